"""Shared mappings that may have huge pages.

The kernel maps 2 MiB of a file by one entry only where address and file offset agree modulo 2 MiB.
`mmap.mmap` takes whatever address comes, which on most kernels is not such a one: then a file of
huge pages is mapped in pieces of 4 KiB, with 256 faults a MiB at the first touch, and what is
mapped like that cannot be collapsed into huge pages either.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import numpy as np
from numpy.typing import NDArray

HUGE_PAGE = 2 << 20
PROT_NONE = 0
MAP_FIXED = 0x10
MAP_NORESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def map_shared(fd: int, size: int) -> NDArray[np.uint8]:
    """The first `size` bytes of a file, shared, writable, at a multiple of 2 MiB.

    Mapped until nothing refers to the array or a part of it any more; the descriptor may be closed
    before. Raises OSError, and ValueError for a size of 0.
    """
    if size <= 0:
        raise ValueError(f"a mapping of {size} bytes")
    # Address space for any alignment, into which the file goes; what is left over is given back.
    reserved = size + HUGE_PAGE
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    base = _map(None, reserved, PROT_NONE, private, -1)
    start = -(-base // HUGE_PAGE) * HUGE_PAGE
    try:
        _map(start, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED, fd)
    except OSError:
        _libc.munmap(base, reserved)
        raise
    end = -(-(start + size) // mmap.PAGESIZE) * mmap.PAGESIZE
    if start > base:
        _libc.munmap(base, start - base)
    if base + reserved > end:
        _libc.munmap(end, base + reserved - end)
    memory = (ctypes.c_ubyte * size).from_address(start)
    # Not at the interpreter's end: other threads may still be at work then.
    weakref.finalize(memory, _libc.munmap, start, size).atexit = False
    return np.frombuffer(memoryview(memory), np.uint8)


def _map(address: int | None, size: int, protection: int, flags: int, fd: int) -> int:
    found = _libc.mmap(address, size, protection, flags, fd, 0)
    if found is None or found == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot map {size} bytes: {os.strerror(number)}")
    return int(found)
