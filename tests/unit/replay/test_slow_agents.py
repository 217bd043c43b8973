"""An agent that is busy is waited for; one that never answers ends the run with a sentence."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvtier_agent.replay import driver
from kvtier_agent.replay.errors import ReplayError
from kvtier_agent.server.client import AgentTimeoutError


class BusyClient:
    """Answers after so many calls that ran out of time."""

    def __init__(self, busy: int, admitting: bool = True) -> None:
        self.busy = busy
        self.admitting = admitting
        self.asked = 0

    def stats(self) -> dict[str, Any]:
        self.asked += 1
        if self.asked <= self.busy:
            raise AgentTimeoutError("no answer within 5 s")
        return {"admitting": self.admitting}


class Unconnected:
    """A client that nobody answers."""

    connected = False
    counters = SimpleNamespace(refusals=0, last_error="no agent takes messages at this socket")


class Watcher:
    def __init__(self, gone: str = "") -> None:
        self.gone = gone

    def advance(self, blocks: int, totals: Any) -> None:
        raise AssertionError("nothing was replayed")

    def alive(self) -> str:
        return self.gone


def test_an_agent_that_makes_large_tiers_is_waited_for() -> None:
    client = BusyClient(busy=3)
    driver._wait_admitting(client, Watcher())  # type: ignore[arg-type]
    assert client.asked == 4


@pytest.mark.parametrize(
    ("client", "gone", "says"),
    [
        (BusyClient(busy=1 << 30), "", "the agent does not answer: no answer within 5 s"),
        (BusyClient(busy=1 << 30), "the agent ended with status 1", "the agent ended"),
        (BusyClient(busy=0, admitting=False), "", "no policy in force; give it one"),
    ],
)
def test_one_that_never_answers_is_said(
    client: BusyClient, gone: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_POLICY_SECONDS", 0.1)
    with pytest.raises(ReplayError, match=says):
        driver._wait_admitting(client, Watcher(gone))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gone", "says"),
    [
        ("", "no agent takes this replay at .*: no agent takes messages"),
        ("the agent ended with status -9", "^the agent ended with status -9$"),
    ],
)
def test_one_that_ended_before_it_was_reached_is_said(
    gone: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "TIMEOUT_SECONDS", 0.1)
    socket = tmp_path / "a.sock"
    socket.touch()
    with pytest.raises(ReplayError, match=says):
        driver._wait_connected(Unconnected(), socket, Watcher(gone))  # type: ignore[arg-type]
