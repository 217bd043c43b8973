"""Where a trace's bytes come from: files, and pipes that have a writer."""

from __future__ import annotations

import gzip
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kvtier_agent.replay import source
from kvtier_agent.replay.errors import ReplayError
from kvtier_agent.replay.trace import read_trace

LINE = b'{"timestamp": 0, "input_length": 1024, "hash_ids": [1, 2]}\n'


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


@pytest.fixture
def beside() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Runs a function on a thread of its own, which has ended after the test."""
    threads: list[threading.Thread] = []

    def start(function: Callable[[], None]) -> None:
        threads.append(threading.Thread(target=function))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_a_pipe_that_nobody_opens_is_an_error(pipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "PATIENCE_SECONDS", 0.2)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(ReplayError, match=r"nobody has opened this pipe .* start its writer"):
        read_trace(pipe)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_pipe_is_read_to_its_end(
    pipe: Path, beside: Callable[..., None], pack: Callable[[bytes], bytes]
) -> None:
    beside(lambda: pipe.write_bytes(pack(LINE * 20_000)) and None)
    assert len(read_trace(pipe).requests) == 20_000


def test_a_writer_that_is_slow_is_waited_for(
    pipe: Path, beside: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than a pipe without a writer would be."""
    monkeypatch.setattr(source, "PATIENCE_SECONDS", 0.0)
    opened = threading.Event()

    def write() -> None:
        with pipe.open("wb", buffering=0) as stream:
            opened.set()
            threading.Event().wait(0.5)
            for byte in LINE:
                stream.write(bytes([byte]))
            stream.write(LINE)

    # A reader of the test's own, so that the writer's open does not wait for the one under test.
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        beside(write)
        assert opened.wait(30)
        assert len(read_trace(pipe).requests) == 2
    finally:
        os.close(reader)


@pytest.mark.parametrize("path", ["/dev/zero", "/"])
def test_what_is_neither_is_an_error(path: str) -> None:
    with pytest.raises(ReplayError, match="this is no file; give a JSONL file"):
        read_trace(Path(path))
