"""What the replay's tests share: generated traces and the command as a subprocess."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import command_run
import pytest
from command_run import KVTIER, Done
from kvtier_agent.replay.driver import new_seed
from kvtier_agent.replay.own_agent import OwnAgent
from kvtier_agent.replay.policyfile import load_policy, with_tiers
from kvtier_agent.replay.sessions import SessionSettings, SessionTraffic
from kvtier_agent.replay.trace import write_trace
from kvtier_cli.main import app
from typer.testing import CliRunner

PAGE_BYTES = 4096
TIERS = {"l0": 256, "l1": 280, "l2": 8000}


@dataclass(frozen=True)
class SharedAgent:
    """An agent for runs that do not need one of their own: one start for many tests."""

    socket: Path
    volume: Path

    @property
    def arguments(self) -> tuple[str, ...]:
        """What makes `kvtier replay` use it."""
        return ("--socket", str(self.socket), "--page-bytes", str(PAGE_BYTES))


@pytest.fixture(scope="session")
def shared_agent() -> Iterator[SharedAgent]:
    policy = with_tiers(load_policy(None), TIERS, PAGE_BYTES)
    command = [*KVTIER, "agent"]
    with OwnAgent(command, policy, volumes={}, seed=new_seed()) as agent:
        yield SharedAgent(agent.socket, agent.volumes["data0"])


@pytest.fixture(scope="session")
def tiers() -> dict[str, int]:
    """Pages per tier that the sessions trace fills, all three of them."""
    return TIERS


@pytest.fixture(scope="session")
def sessions_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 requests of agent and chat sessions, about 19,000 blocks."""
    path = tmp_path_factory.mktemp("traces") / "sessions.jsonl.gz"
    settings = SessionSettings(seed=3, sessions_per_second=0.3)
    write_trace(path, SessionTraffic(settings).requests(count=600))
    return path


@pytest.fixture(scope="session")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Done]:
    """Runs `kvtier replay` with these arguments to its end."""

    def run(*arguments: object) -> Done:
        return command_run.run(
            "replay", *arguments, timeout=100, folder=tmp_path_factory.mktemp("replay")
        )

    return run


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """The same in this process, for runs against the shared agent: nothing has to be started."""
    monkeypatch.setattr("signal.signal", lambda *_: None)

    def run(*arguments: object) -> Done:
        done = CliRunner().invoke(app, ["replay", *map(str, arguments)])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return Done(done.exit_code, done.stdout, done.stderr)

    return run
