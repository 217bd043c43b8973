"""A benchmark that is interrupted, or killed, leaves one line and nothing else behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

KVTIER = (sys.executable, "-m", "kvtier_cli.main")
FOLDERS = (Path("/dev/shm"), Path("/tmp"))


@pytest.fixture
def running() -> Iterator[subprocess.Popen[str]]:
    """A benchmark with helpers that would take many minutes."""
    process = subprocess.Popen(
        [*KVTIER, "bench", "lookup", "--pages", "1024", "--rounds", "100", "--calls", "1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert eventually(lambda: len(processes(process.pid)) >= 2), "its processes did not start"
        yield process
    finally:
        process.kill()
        process.communicate()


def folders(pid: int) -> list[Path]:
    return [one for folder in FOLDERS for one in folder.glob(f"kvtier-bench-{pid}-*")]


def processes(pid: int) -> list[int]:
    """Processes whose command line names this run's folders: the agent, the baseline's server."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if f"kvtier-bench-{pid}-".encode() in line:
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
def test_an_interrupted_benchmark_says_so_and_is_gone(
    running: subprocess.Popen[str], how: signal.Signals
) -> None:
    running.send_signal(how)
    out, err = running.communicate(timeout=30)
    assert running.returncode == 130
    assert out == ""
    assert "interrupted" in err
    assert "Traceback" not in err
    assert folders(running.pid) == []
    assert processes(running.pid) == []


def test_a_killed_benchmark_leaves_nothing(running: subprocess.Popen[str]) -> None:
    running.kill()
    running.wait(30)
    assert eventually(lambda: not folders(running.pid) and not processes(running.pid))
