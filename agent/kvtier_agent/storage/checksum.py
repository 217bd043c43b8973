"""Checksums: xxh3-64. Of a page, see `cache.units`; how it is made stands in every header.

64 bits, because it is there to find damage, not an attacker: a client that may write into an arena
may also commit what it likes. It runs above 10 GB/s on one core from a wheel, several times as fast
where the native extension is.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.native import copier

ALGORITHM_XXH3_64 = 1
"""Of the page as a whole."""
ALGORITHM_XXH3_64_UNITS = 2
"""Of the sums of the page's transfer units, which lie behind the header."""


def checksums(
    block: NDArray[np.uint8], rows: NDArray[np.uint32], length: int
) -> NDArray[np.uint64]:
    """Checksum of the first `length` bytes of some rows of a block, (rows, bytes)."""
    starts = rows.astype(np.uint64) * np.uint64(block.shape[1])
    return copier.checksums(block, starts, length)
