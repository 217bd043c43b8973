"""The page table as it lies in shared memory, and the batch lookup in it: common to its writer
(`page_table`) and its readers (`table_reader`). The layout is described in `page_table`."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.index_hash import home
from kvtier_agent.cache.record import NO_ROW, RECORD, Rows

MAGIC = b"KVTIERPT"
LAYOUT_VERSION = 2
HEADER_BYTES = 8192
INDEX_PER_PAGE = 4  # room for a power of two that keeps the index at most half full
EMPTY = 0xFFFFFFFF
TOMB = 0xFFFFFFFE
_RECORD_WORDS = RECORD.itemsize // 8
_KEY_WORD = dict(RECORD.fields or {})["key"][1] // 8
_WINDOWS = tuple(np.arange(places)[:, None] for places in (8, 32))
"""Places of the index that a lookup looks at in its second and each later round, as columns."""

HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("layout_version", "<u4"),
        ("record_bytes", "<u4"),
        ("boot_id", "V16"),
        ("max_pages", "<u8"),
        ("capacity", "<u8"),  # records in use by the writer; the rest of the file is a hole
        ("index_slots", "<u8"),  # power of two
        ("index_seq", "<u8"),
        ("pages", "<u8"),
        # Bytes from the start of each arena that surely have memory behind them.
        ("l0_backed", "<u8"),
        ("l1_backed", "<u8"),
        ("hash_seed", "<u8"),
    ]
)


class TableError(Exception):
    """The table cannot be made, grown or read; one line that says what to do."""


def table_bytes(max_pages: int) -> int:
    """Bytes of a table file with room for ``max_pages``, all of it in use."""
    return HEADER_BYTES + max_pages * (RECORD.itemsize + 4 * INDEX_PER_PAGE)


class TableView:
    """A mapped table file: its arrays and the batch lookup, common to writer and readers."""

    def __init__(self, buffer: mmap.mmap, max_pages: int) -> None:
        self.max_pages = max_pages
        self._buffer = buffer
        self.header: NDArray[Any] = np.frombuffer(buffer, dtype=HEADER, count=1)
        self.records: NDArray[Any] = np.frombuffer(
            buffer, dtype=RECORD, count=max_pages, offset=HEADER_BYTES
        )
        self.index: NDArray[np.uint32] = np.frombuffer(
            buffer,
            dtype="<u4",
            count=INDEX_PER_PAGE * max_pages,
            offset=HEADER_BYTES + max_pages * RECORD.itemsize,
        )
        for name in RECORD.names or ():
            setattr(self, name, self.records[name])
        self.key: NDArray[np.uint64] = self.records["key"]
        # The same records as plain words: to take from a flat array is several times faster.
        self._words: NDArray[np.uint64] = np.frombuffer(
            buffer, dtype="<u8", count=max_pages * _RECORD_WORDS, offset=HEADER_BYTES
        )

    def find(self, pairs: NDArray[np.uint64]) -> Rows:
        """Rows of keys given as (n, 2) uint64; NO_ROW where absent."""
        mask = int(self.header["index_slots"][0]) - 1
        where = self._home(pairs)
        row = self.index.take(where)
        real = row < TOMB
        word = self._key_word(row, real)
        match = self._words.take(word) == pairs[:, 0]
        word += 1
        match &= self._words.take(word) == pairs[:, 1]
        match &= real
        found = np.where(match, row, np.uint32(NO_ROW))
        active = (~match & (row != EMPTY)).nonzero()[0]
        if active.size:
            self._find_further(pairs, found, active, where[active] + 1, mask)
        return found

    def _find_further(
        self,
        pairs: NDArray[np.uint64],
        found: Rows,
        active: NDArray[np.intp],
        where: NDArray[np.intp],
        mask: int,
    ) -> None:
        """Fill in `found` for the keys `active`, whose next place to look is `where`. Few are left
        after the first probe, some of them in long clusters: a round looks at a window of places
        at once, for numpy's price is by the call and not by the element."""
        windows = iter(_WINDOWS)
        ahead = next(windows)
        while active.size:
            row = self.index.take((where + ahead) & mask)  # (places, keys)
            word = self._key_word(row, row < TOMB)
            likely = (self._words.take(word) == pairs[active, 0]).ravel().nonzero()[0]
            which = likely % active.size
            rows = row.ravel()[likely]
            good = self._words.take(word.ravel()[likely] + 1) == pairs[active[which], 1]
            good &= rows < TOMB
            if not good.all():
                which, rows = which[good], rows[good]
            found[active[which]] = rows
            going = (row != EMPTY).all(axis=0)
            going[which] = False
            active, where = active[going], where[going] + len(ahead)
            ahead = next(windows, ahead)

    def _home(self, pairs: NDArray[np.uint64]) -> NDArray[np.intp]:
        """Where in the index the search for each key begins."""
        header = self.header
        return home(pairs, int(header["hash_seed"][0]), int(header["index_slots"][0]))

    @staticmethod
    def _key_word(row: Rows, real: NDArray[np.bool_]) -> NDArray[np.intp]:
        """Where in `_words` the keys of these rows begin; row 0 stands for those that are none."""
        word = np.multiply(row, real, dtype=np.intp)
        word *= _RECORD_WORDS
        word += _KEY_WORD
        return word
