"""The index of the page table: from keys to rows, rows into it and out of it, a batch at a time.

Open addressing with linear probing: a place holds a row, EMPTY or TOMB. In two ways with the same
answers: by the native extension, key by key, and by numpy where that is not installed, in rounds
over the keys that are not settled yet (one probe distance each; a search's further rounds look at a
window of places). The one by numpy is the oracle of the tests. 1,024 keys take the other a tenth of
its time.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.index_hash import (
    EARLY_LEAST,
    EARLY_PART,
    EARLY_PROBES,
    MOST_PROBES,
    crowded,
    home,
)
from kvtier_agent.cache.record import NO_ROW, RECORD, Rows
from kvtier_agent.native import NATIVE

EMPTY: Final = 0xFFFFFFFF
TOMB: Final = 0xFFFFFFFE
_FIELDS: Final[Mapping[str, Any]] = dict(RECORD.fields or {})
_RECORD_WORDS: Final = RECORD.itemsize // 8
_KEY_WORD: Final = _FIELDS["key"][1] // 8
_WITHOUT_END: Final = (1 << 64) - 1
_WINDOWS: Final = tuple(np.arange(places)[:, None] for places in (8, 32))
"""Places of the index that a search looks at in its second and each later round, as columns."""

Pairs = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where things lie in a table's memory, in bytes from its start, and how many there are.
    `seed`, `slots`: the numbers of the header that say how keys are hashed, and how many of the
    `places` of the index are in use, a power of two."""

    records: int
    max_pages: int
    index: int
    places: int
    seed: int
    slots: int


class TableIndex(Protocol):
    """Keys are (n, 2) uint64. One thread of one process writes; a search in an index that another
    process rebuilds meanwhile may miss keys, and no more than that."""

    def find(self, pairs: Pairs) -> Rows:
        """Rows of keys; NO_ROW where absent."""

    def states(self, pairs: Pairs) -> NDArray[np.uint8]:
        """The state of each key's page; FREE where there is none."""

    def link(self, rows: Rows, *, patient: bool) -> tuple[bool, int]:
        """Rows into the index, by the keys in their records. False: it is so crowded that this was
        given up (`index_hash`), with some of them in, unless `patient`. How many tombstones they
        took the places of."""

    def unlink(self, rows: Rows) -> None:
        """Rows out of the index; a tombstone takes the place of each. AssertionError: one of them
        was not in it."""


def index_over(buffer: mmap.mmap, layout: Layout) -> TableIndex:
    """The index of the table in `buffer`."""
    return NumpyIndex(buffer, layout) if NATIVE is None else NativeIndex(NATIVE, buffer, layout)


class NativeIndex:
    """`kvtier_native.Index`."""

    def __init__(self, module: Any, buffer: mmap.mmap, layout: Layout) -> None:
        index = module.Index(
            buffer, record_bytes=RECORD.itemsize, key=_FIELDS["key"][1], records=layout.records,
            max_pages=layout.max_pages, index=layout.index, places=layout.places, seed=layout.seed,
            slots=layout.slots,
        )  # fmt: skip
        self._find, self._bytes = index.find, index.bytes
        self._link, self._unlink = index.link, index.unlink
        self._state = _FIELDS["state"][1]

    def find(self, pairs: Pairs) -> Rows:
        """See `TableIndex.find`."""
        rows: Rows = np.empty(len(pairs), np.uint32)
        self._find(np.ascontiguousarray(pairs), rows)
        return rows

    def states(self, pairs: Pairs) -> NDArray[np.uint8]:
        """See `TableIndex.states`."""
        states: NDArray[np.uint8] = np.empty(len(pairs), np.uint8)
        self._bytes(np.ascontiguousarray(pairs), self._state, states)
        return states

    def link(self, rows: Rows, *, patient: bool) -> tuple[bool, int]:
        """See `TableIndex.link`; as patient as `index_hash.crowded`."""
        most, early, late = MOST_PROBES, EARLY_PROBES, max(EARLY_LEAST, len(rows) // EARLY_PART)
        if patient:
            most = early = late = _WITHOUT_END
        done: tuple[bool, int] = self._link(_as_rows(rows), most, early, late)
        return done

    def unlink(self, rows: Rows) -> None:
        """See `TableIndex.unlink`."""
        self._unlink(_as_rows(rows))


class NumpyIndex:
    """Without the native extension."""

    def __init__(self, buffer: mmap.mmap, layout: Layout) -> None:
        count = layout.max_pages * _RECORD_WORDS
        # Records as plain words: to take from a flat array is several times faster.
        self._words: NDArray[np.uint64] = np.frombuffer(buffer, "<u8", count, layout.records)
        self._index: Rows = np.frombuffer(buffer, "<u4", layout.places, layout.index)
        self._seed: Pairs = np.frombuffer(buffer, "<u8", 1, layout.seed)
        self._slots: Pairs = np.frombuffer(buffer, "<u8", 1, layout.slots)
        records: NDArray[Any] = np.frombuffer(buffer, RECORD, layout.max_pages, layout.records)
        self._state: NDArray[np.uint8] = records["state"]
        self._key: Pairs = records["key"]

    def find(self, pairs: Pairs) -> Rows:
        """See `TableIndex.find`."""
        where, mask = self._homes(pairs)
        row = self._index.take(where)
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
        pairs: Pairs,
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
            row = self._index.take((where + ahead) & mask)  # (places, keys)
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

    def states(self, pairs: Pairs) -> NDArray[np.uint8]:
        """See `TableIndex.states`."""
        rows = self.find(pairs)
        there = rows != NO_ROW
        states: NDArray[np.uint8] = np.zeros(len(rows), np.uint8)
        states[there] = self._state[rows[there]]
        return states

    def link(self, rows: Rows, *, patient: bool) -> tuple[bool, int]:
        """See `TableIndex.link`."""
        where, mask = self._homes(self._key[rows])
        active = rows
        rounds = tombs = 0
        while active.size:
            if not patient and crowded(rounds, active.size, rows.size):
                return False, tombs
            held = self._index[where]
            open_ = np.flatnonzero(held >= TOMB)
            # Several rows may want the same open slot: the one that stands there then has it.
            spots = where[open_]
            self._index[spots] = active[open_]
            winners = open_[self._index[spots] == active[open_]]
            tombs += int((held[winners] == TOMB).sum())
            going = np.ones(active.size, dtype=bool)
            going[winners] = False
            active = active[going]
            where = (where[going] + 1) & mask
            rounds += 1
        return True, tombs

    def unlink(self, rows: Rows) -> None:
        """See `TableIndex.unlink`."""
        where, mask = self._homes(self._key[rows])
        active = np.arange(len(rows))
        while active.size:
            here = self._index[where] == rows[active]
            self._index[where[here]] = TOMB
            lost = ~here & (self._index[where] == EMPTY)
            if lost.any():
                raise AssertionError("a row to be unlinked is not in the index")
            active = active[~here]
            where = (where[~here] + 1) & mask

    def _homes(self, pairs: Pairs) -> tuple[NDArray[np.intp], int]:
        """Where the search for each key begins, and the mask of the index."""
        slots = self._slots.item()
        return home(pairs, self._seed.item(), slots), slots - 1

    @staticmethod
    def _key_word(row: Rows, real: NDArray[np.bool_]) -> NDArray[np.intp]:
        """Where in `_words` the keys of these rows begin; row 0 stands for those that are none."""
        word = np.multiply(row, real, dtype=np.intp)
        word *= _RECORD_WORDS
        word += _KEY_WORD
        return word


def _as_rows(rows: Rows) -> Rows:
    return np.ascontiguousarray(rows, np.uint32)
