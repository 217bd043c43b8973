"""Memory that was freed goes back to the system.

The C library keeps what lies between blocks that are still in use. An agent makes arrays of
megabytes for an instant (a batch of puts, a checkpoint) between small ones that last, so after a
while a third of its heap would be such gaps.
"""

from __future__ import annotations

import ctypes
from typing import Any

_TRIM: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl needs none


def give_back() -> bool:
    """Give unused pages of the heap back: some milliseconds, without the interpreter's lock. False
    where there was nothing to give, or no way to."""
    return _TRIM is not None and bool(_TRIM(0))
