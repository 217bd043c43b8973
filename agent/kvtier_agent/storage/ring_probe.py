"""Does a ring move bytes here? One that can be set up may still be of no use: seccomp profiles
forbid the calls of io_uring one by one, and what was submitted then never ends."""

from __future__ import annotations

import errno
import os
import select
import time
from typing import Any

import numpy as np

from kvtier_agent.native import READ, TRANSFER_COLUMNS

SECONDS = 5.0
"""A read from memory takes microseconds; a machine may be busy."""
_LOOK_SECONDS = 0.05


def probe(ring: Any, length: int) -> None:
    """Read `length` bytes into the start of the memory of `ring` (as `native.ring` makes it, new).
    Raises OSError where the read does not end; one that ends with an error has shown enough."""
    file = os.memfd_create("kvtier-ring-probe")
    try:
        os.truncate(file, length)
        row = np.zeros((1, len(TRANSFER_COLUMNS)), np.uint64)
        row[0, TRANSFER_COLUMNS.index("operation")] = READ
        row[0, TRANSFER_COLUMNS.index("file")] = ring.add_file(file)
        row[0, TRANSFER_COLUMNS.index("length")] = length
        ring.submit(row, together=True)
        ready = select.poll()
        ready.register(ring.fileno(), select.POLLIN)
        end = time.monotonic() + SECONDS
        while not ring.broken:
            ready.poll(_LOOK_SECONDS * 1000)
            if len(ring.collect()):
                return
            if time.monotonic() > end:
                raise OSError(errno.ETIMEDOUT, "a transfer by io_uring does not end here")
        raise OSError(
            errno.EPERM, "io_uring can be set up here and moves nothing (seccomp profile)"
        )
    finally:
        os.close(file)
