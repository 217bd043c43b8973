"""A replay that is ended, or whose agent is, leaves one line and nothing else behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kvtier_agent.replay.sessions import SessionSettings, SessionTraffic
from kvtier_agent.replay.trace import write_trace

KVTIER = (sys.executable, "-m", "kvtier_cli.main")
FOLDERS = (Path("/dev/shm"), Path("/tmp"))


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
        assert eventually(lambda: len(folders(process.pid)) > 0 and agents(process.pid)), (
            "the replay's own agent did not start"
        )
        time.sleep(1)
        yield process
    finally:
        process.kill()
        process.communicate()


def folders(pid: int) -> list[Path]:
    return [one for folder in FOLDERS for one in folder.glob(f"kvtier-replay-{pid}-*")]


def agents(pid: int) -> list[int]:
    """Processes whose command line names this replay's folders."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if f"kvtier-replay-{pid}-".encode() in line:
                found.append(int(entry.name))
    return found


def eventually(condition: Callable[[], object], seconds: float = 30) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())


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
    assert not agents(running.pid)
    assert not folders(running.pid)


def test_a_killed_replay_takes_its_agent_and_folders_with_it(
    running: subprocess.Popen[str],
) -> None:
    running.kill()
    running.wait(10)
    assert eventually(lambda: not agents(running.pid) and not folders(running.pid))


def test_a_replay_whose_agent_died_says_why(running: subprocess.Popen[str]) -> None:
    for pid in agents(running.pid):
        os.kill(pid, signal.SIGKILL)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 1
    assert out == ""
    assert "error: the agent ended" in err
    assert "Traceback" not in err
    assert not folders(running.pid)
