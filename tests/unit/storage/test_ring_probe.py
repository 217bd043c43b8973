"""Where a ring can be set up and moves nothing, transfers go by calls from the start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from kvtier_agent import native
from kvtier_agent.storage import ring_probe

FORBIDDEN = """
import ctypes, struct, sys
from kvtier_agent import native
from kvtier_agent.storage.ring_probe import probe

IO_URING_ENTER, ALLOW, EPERM = 426, 0x7FFF0000, 0x00050001
filters = [(0x20, 0, 0, 0), (0x15, 0, 1, IO_URING_ENTER), (0x06, 0, 0, EPERM), (0x06, 0, 0, ALLOW)]
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in filters))

class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filters", ctypes.c_void_p)]

libc = ctypes.CDLL(None, use_errno=True)
NO_NEW_PRIVILEGES, SECCOMP, FILTER = 38, 22, 2
asked = ctypes.byref(Program(len(filters), ctypes.addressof(program)))
if libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(SECCOMP, FILTER, asked, 0, 0):
    sys.exit(77)
ring = native.ring(bytearray(4096))
try:
    probe(ring, 4096)
except OSError as error:
    print(error.strerror)
sys.stdout.flush()
ring.close(1.0)
import os; os._exit(0)
"""


class Silent:
    """A ring from which nothing comes back."""

    broken = False

    def __init__(self, file: int) -> None:
        self.file = file

    def add_file(self, _file: int) -> int:
        return 0

    def submit(self, _rows: object, *, together: bool) -> None:
        assert together

    def collect(self) -> bytes:
        return b""

    def fileno(self) -> int:
        return self.file


def needs_rings() -> None:
    try:
        native.ring(bytearray(4096)).close(1.0)
    except OSError as error:
        pytest.skip(f"no io_uring here: {error}")


def test_a_ring_that_works_passes() -> None:
    needs_rings()
    memory = bytearray(b"x" * 4096)
    ring = native.ring(memory)
    try:
        ring_probe.probe(ring, 4096)
    finally:
        ring.close(5.0)
    assert memory == bytes(4096)


def test_one_that_may_not_submit_is_found_at_once() -> None:
    needs_rings()
    done = subprocess.run(
        [sys.executable, "-c", FORBIDDEN], capture_output=True, text=True, timeout=60
    )
    if done.returncode == 77:
        pytest.skip("no seccomp filters here")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "io_uring can be set up here and moves nothing (seccomp profile)"


def test_one_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_probe, "SECONDS", 0.1)
    with Path("/dev/null").open() as nothing, pytest.raises(OSError, match="does not end"):
        ring_probe.probe(Silent(nothing.fileno()), 4096)
