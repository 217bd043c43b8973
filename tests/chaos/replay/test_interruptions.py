"""A replay that is ended, or whose agent is, leaves one line and nothing else behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_run import KVTIER
from kvtier_agent.replay.sessions import SessionSettings, SessionTraffic
from kvtier_agent.replay.trace import write_trace
from leftovers import eventually, folders, processes


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    write_trace(path, SessionTraffic(SessionSettings(seed=5)).requests(count=2000))
    return path


@pytest.fixture
def running(trace: Path) -> Iterator[subprocess.Popen[str]]:
    """A paced replay that would take many minutes."""
    process = subprocess.Popen(
        [*KVTIER, "replay", trace, "--page-bytes", "4096", "--speed", "5", "--json", "-"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert eventually(
            lambda: len(folders("replay", process.pid)) > 0 and processes("replay", process.pid)
        ), "the replay's own agent did not start"
        time.sleep(1)
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_replay_says_so_and_is_gone(
    running: subprocess.Popen[str], how: signal.Signals
) -> None:
    running.send_signal(how)
    out, err = running.communicate(timeout=30)
    assert running.returncode == 130
    assert out == ""
    assert "interrupted" in err
    assert "Traceback" not in err
    assert not processes("replay", running.pid)
    assert not folders("replay", running.pid)


def test_a_killed_replay_takes_its_agent_and_folders_with_it(
    running: subprocess.Popen[str],
) -> None:
    running.kill()
    running.wait(10)
    assert eventually(
        lambda: not processes("replay", running.pid) and not folders("replay", running.pid)
    )


def test_a_replay_whose_agent_died_says_why(running: subprocess.Popen[str]) -> None:
    for pid in processes("replay", running.pid):
        os.kill(pid, signal.SIGKILL)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 1
    assert out == ""
    assert "error: the agent ended" in err
    assert "Traceback" not in err
    assert not folders("replay", running.pid)
