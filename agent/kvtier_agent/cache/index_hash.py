"""Where the search for a key begins in the index of the page table.

Keys are hashes when engines make them; but they come from clients, and one that chose keys with
equal words would make every search a walk over all of them, for every trust domain served by the
same thread. So both words are mixed with a random seed of the table (multiply and fold, as in
wyhash and its kin). A domain's own clients can read the seed: what they could still build, at the
price of a search of their own, is met by taking another seed once the index is found crowded.
"""

from __future__ import annotations

import os
from typing import Final

import numpy as np
from numpy.typing import NDArray

MOST_PROBES: Final = 512
"""Longest walk that is put up with. In an index that is half full, an eighth of it tombstones, the
longest of four million is about 160 (Knuth, The Art of Computer Programming 3, 6.4)."""
EARLY_PROBES: Final = 64
"""After so many steps nearly all of a batch has found its place."""
EARLY_PART: Final = 8
EARLY_LEAST: Final = 64

_FIRST: Final = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd
_SECOND: Final = np.uint64(0xD6E8FEB86659FD93)  # odd, from the mixer of Pelle Evensen
_FOLD: Final = np.uint64(32)


def new_seed() -> int:
    """64 random bits."""
    return int.from_bytes(os.urandom(8), "little")


def home(pairs: NDArray[np.uint64], seed: int, slots: int) -> NDArray[np.intp]:
    """Positions (n,) for keys (n, 2); `slots`: size of the index, a power of two."""
    word = pairs[:, 0] ^ np.uint64(seed)
    word *= _FIRST
    word ^= word >> _FOLD
    word += pairs[:, 1]
    word *= _SECOND
    word ^= word >> _FOLD
    word &= np.uint64(slots - 1)
    return word.astype(np.intp)


def crowded(rounds: int, left: int, batch: int) -> bool:
    """Whether a batch of insertions goes so badly that another seed is worth a rebuild: `left` of
    its keys have no place after `rounds` steps."""
    if rounds >= MOST_PROBES:
        return True
    return rounds >= EARLY_PROBES and left > max(EARLY_LEAST, batch // EARLY_PART)
