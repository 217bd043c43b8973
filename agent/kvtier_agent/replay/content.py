"""What a page holds in a replay: bytes that follow from its key, so that any wrong byte shows.

A page is a fixed pseudo-random block combined (exclusive or) with the page's own 128-bit key:
the first half of the page with the key's first eight bytes, the second half with the rest. So

- another page's bytes differ in every word, for keys differ in both halves;
- bytes moved within a page differ, since the block never repeats;
- a torn page (half old, half new) differs in the half that does not belong;
- a page left over from another run differs, since the block is made from the run's seed.

Making and checking a page costs one pass each over memory that fits a core's cache: a few
microseconds for 16 KiB. Nothing is stored to compare with, and nothing has to be.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]

ALIGNMENT = 16
"""Page sizes are multiples of this many bytes: two halves of whole 64-bit words."""

_TILE_BYTES = 256 << 10
"""Pages are checked in tiles about as large as a core's second-level cache."""


class Content:
    """The bytes of pages of one size in one run.

    Args:
        page_bytes: size of a page, a multiple of 16.
        seed: of the pseudo-random block; equal seeds make equal pages for equal keys.
    """

    def __init__(self, page_bytes: int, seed: int) -> None:
        if page_bytes <= 0 or page_bytes % ALIGNMENT:
            raise ValueError(f"page_bytes must be a multiple of {ALIGNMENT}, not {page_bytes}")
        self.page_bytes = page_bytes
        self._half = page_bytes // ALIGNMENT
        generator = np.random.Generator(np.random.PCG64(seed))
        self._block: Words = generator.integers(
            0, 1 << 64, size=2 * self._half, dtype=np.uint64, endpoint=False
        )
        self.tile_pages = max(1, _TILE_BYTES // page_bytes)
        self._mixed: Words = np.empty((self.tile_pages, 2 * self._half), dtype=np.uint64)
        self._differs = np.empty((self.tile_pages, 2 * self._half), dtype=np.bool_)

    def fill(self, keys: Bytes, out: Bytes) -> None:
        """Write the pages of `keys` (n, 16) into `out` (n, page_bytes), both C-contiguous."""
        words = _as_words(out)
        halves = _as_words(keys)
        half = self._half
        for half_number in (0, 1):
            part = slice(half_number * half, (half_number + 1) * half)
            np.bitwise_xor(
                self._block[part], halves[:, half_number : half_number + 1], out=words[:, part]
            )

    def wrong(self, keys: Bytes, pages: Bytes) -> npt.NDArray[np.int64]:
        """How many bytes of each page are not what its key says: int64[n], 0 = right."""
        words = _as_words(pages)
        halves = _as_words(keys)
        half = self._half
        counts = np.zeros(len(keys), dtype=np.int64)
        for start in range(0, len(keys), self.tile_pages):
            stop = min(start + self.tile_pages, len(keys))
            mixed = self._mixed[: stop - start]
            differs = self._differs[: stop - start]
            np.bitwise_xor(words[start:stop], self._block, out=mixed)
            np.not_equal(mixed[:, :half], halves[start:stop, 0:1], out=differs[:, :half])
            np.not_equal(mixed[:, half:], halves[start:stop, 1:2], out=differs[:, half:])
            if differs.any():
                for row in np.flatnonzero(differs.any(axis=1)):
                    counts[start + row] = self._wrong_bytes(keys[start + row], pages[start + row])
        return counts

    def _wrong_bytes(self, key: Bytes, page: Bytes) -> int:
        expected = np.empty((1, self.page_bytes), dtype=np.uint8)
        self.fill(key.reshape(1, 16), expected)
        return int(np.count_nonzero(expected[0] != page))


def _as_words(array: Bytes) -> Words:
    return array.view(np.uint64)
