"""A benchmark that is interrupted, or killed, leaves one line and nothing else behind."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator

import pytest
from command_run import KVTIER
from leftovers import eventually, folders, processes


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
        assert eventually(lambda: len(processes("bench", process.pid)) >= 2), (
            "its processes did not start"
        )
        yield process
    finally:
        process.kill()
        process.communicate()


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
    assert folders("bench", running.pid) == []
    assert processes("bench", running.pid) == []


def test_a_killed_benchmark_leaves_nothing(running: subprocess.Popen[str]) -> None:
    running.kill()
    running.wait(30)
    assert eventually(
        lambda: not folders("bench", running.pid) and not processes("bench", running.pid)
    )
