"""A trace's bytes, from a file or from a pipe that somebody writes into."""

from __future__ import annotations

import io
import os
import stat
import time
from pathlib import Path
from typing import Any

from kvtier_agent.replay.errors import ReplayError

PATIENCE_SECONDS = 10.0
"""How long a pipe may be without a writer. One that is open and slow is waited for."""
LOOK_SECONDS = 0.05


def open_source(path: Path) -> io.BufferedReader:
    """The file, to be read from its beginning. Raises OSError; ReplayError for what is neither file
    nor pipe, and for a pipe that nobody opens for writing in time."""
    # The plain open of a pipe waits for its writer, for ever if need be.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(fd).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
        os.close(fd)
        raise ReplayError(
            f"{path}: cannot be read: this is no file; give a JSONL file, plain or .gz, or a pipe"
        )
    raw = io.FileIO(fd)
    try:
        first = _await_writer(raw, path) if stat.S_ISFIFO(mode) else b""
        os.set_blocking(fd, True)
    except BaseException:
        raw.close()
        raise
    return io.BufferedReader(_From(first, raw) if first else raw)


def _await_writer(raw: io.FileIO, path: Path) -> bytes:
    """Return when a pipe has a writer, with the byte that was read to find out, if any."""
    end = time.monotonic() + PATIENCE_SECONDS
    while (first := raw.read(1)) == b"":  # None: a writer has it open, and has not written yet
        if time.monotonic() > end:
            raise ReplayError(
                f"{path}: nobody has opened this pipe for writing in {PATIENCE_SECONDS:g} s; start"
                " its writer, or give a file"
            )
        time.sleep(LOOK_SECONDS)
    return first or b""


class _From(io.RawIOBase):
    """A byte that was read ahead, then the rest."""

    def __init__(self, first: bytes, rest: io.FileIO) -> None:
        self._first = first
        self._rest = rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if self._first:
            # With what follows: whoever peeks at the first bytes sees more than one.
            into = memoryview(buffer)
            into[:1], self._first = self._first, b""
            return 1 + (self._rest.readinto(into[1:]) or 0)
        return self._rest.readinto(buffer)

    def close(self) -> None:
        self._rest.close()
        super().close()
