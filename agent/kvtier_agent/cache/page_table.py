"""The page table: one record per page and an index over their keys, in one shared file.

    header (8192) | records: max_pages x 128 | index: 4 x max_pages x u32

The header says in notes (`table_notes`) what the records mean. A new table is made under another
name and published whole, in place of what an earlier process left there.

The file is sparse at its largest size and never changes its length, so a reader maps it once; the
part in use is backed by `posix_fallocate` before it is touched (a full tmpfs is an error, never a
SIGBUS). The index is open addressing with linear probing: a slot holds a row number, EMPTY or
TOMB. Where a key's search begins is `index_hash`'s: a table that got crowded all the same (a client
can choose its keys) is rebuilt with another seed. It is at most half full; tombstones are swept by
a rebuild when they pass an eighth. All operations take batches; those on the index are in
`table_index`.

One process writes. Others read through `TableReader`: `index_seq` in the header is odd during a
rebuild, `seq` in a record is odd while that record changes; whoever sees an odd or changed number
looks again.
"""

from __future__ import annotations

import mmap
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.index_hash import new_seed
from kvtier_agent.cache.record import (
    NO_ROW,
    NO_SLOT,
    RECORD,
    Flag,
    Rows,
    State,
    as_u64_pairs,
    check_transition,
    seals,
)
from kvtier_agent.cache.table_index import EMPTY, TOMB
from kvtier_agent.cache.table_notes import Place, write_note
from kvtier_agent.cache.table_view import (
    HEADER_BYTES,
    LAYOUT_VERSION,
    MAGIC,
    TableError,
    TableView,
    table_bytes,
)
from kvtier_agent.cache.words import as_words

FIRST_CAPACITY = 4096
AT_ONCE = 1 << 14
"""Records that are written together: they stay in the processor's cache meanwhile."""
TABLE_MODE = 0o640


def _as_records(words: NDArray[np.uint64]) -> NDArray[Any]:
    return words.view(RECORD).reshape(-1)


def _blank() -> NDArray[np.uint64]:
    blank = np.zeros(1, dtype=RECORD)
    for nowhere in ("l0_slot", "l1_slot", "l2_slot"):
        blank[nowhere] = NO_SLOT
    blank["parent_row"] = NO_ROW
    return as_words(blank)


_KEY_WORD = dict(RECORD.fields or {})["key"][1] // 8
_BLANK = _blank()


class _Changing:
    """A class and no generator: half of the microseconds."""

    __slots__ = ("_rows", "_seq")

    def __init__(self, seq: NDArray[np.uint32], rows: Rows) -> None:
        self._seq = seq
        self._rows = rows

    def __enter__(self) -> None:
        self._seq[self._rows] += np.uint32(1)

    def __exit__(self, *_: object) -> None:
        self._seq[self._rows] += np.uint32(1)


class PageTable(TableView):
    """The writer's side. Every record field is an array attribute (`state`, `pins`, ...)."""

    state: NDArray[np.uint8]
    tiers: NDArray[np.uint8]
    flags: NDArray[np.uint8]
    parent: NDArray[np.uint64]
    checksum: NDArray[np.uint64]
    size: NDArray[np.uint32]
    depth: NDArray[np.uint32]
    l0_slot: NDArray[np.uint32]
    l1_slot: NDArray[np.uint32]
    l2_slot: NDArray[np.uint32]
    parent_row: NDArray[np.uint32]
    pins: NDArray[np.uint32]
    hits: NDArray[np.uint32]
    client: NDArray[np.uint32]
    frozen: NDArray[np.uint16]
    tenant: NDArray[np.uint16]
    last_access: NDArray[np.float64]
    demoted_at: NDArray[np.float64]
    touch: NDArray[np.uint64]
    seal: NDArray[np.uint64]
    seq: NDArray[np.uint32]

    def __init__(
        self,
        path: Path | None = None,
        *,
        max_pages: int = 1 << 20,
        boot_id: bytes = bytes(16),
        mode: int = TABLE_MODE,
        gid: int | None = None,
        publish: bool = True,
    ) -> None:
        """A new, empty table in private memory, or at `path` from `publish` on (here, unless told
        otherwise). Raises TableError, OSError."""
        self.path = path
        self._draft: Path | None = None
        size = table_bytes(max_pages)
        self._fd = -1
        if path is None:
            buffer = mmap.mmap(-1, size)
        else:
            draft = self._draft = path.with_name(path.name + ".new")
            draft.unlink(missing_ok=True)
            self._fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(self._fd, size)
                if gid is not None:
                    os.fchown(self._fd, -1, gid)
                os.fchmod(self._fd, mode)
                self._back(0, HEADER_BYTES)
                buffer = mmap.mmap(self._fd, size)
            except BaseException:
                self.close()
                raise
        super().__init__(buffer, max_pages)
        self._words = as_words(self.records)
        header = self.header
        header["layout_version"] = LAYOUT_VERSION
        header["record_bytes"] = RECORD.itemsize
        header["boot_id"] = np.void(boot_id)
        header["max_pages"] = max_pages
        header["hash_seed"] = new_seed()
        self._free = np.empty(0, dtype=np.uint32)
        self._free_count = 0
        self._tombs = 0
        self.pages = 0
        self.capacity = 0
        try:
            self._grow(min(FIRST_CAPACITY, max_pages))
        except TableError:
            self.close()
            raise
        header["magic"] = MAGIC
        if publish:
            self.publish()

    def publish(self) -> None:
        """Show the table at its path, in place of what is there."""
        if self._draft is not None and self.path is not None:
            self._draft.replace(self.path)
            self._draft = None

    def note(self, place: Place, value: Any) -> bool:
        """Replace a note in the header; False where it is too long (`table_notes`)."""
        return write_note(self._buffer, place, value)

    @property
    def used_bytes(self) -> int:
        """Bytes of the table that are backed by memory."""
        slots = int(self.header["index_slots"][0])
        return HEADER_BYTES + self.capacity * RECORD.itemsize + 4 * slots

    def lookup(self, keys: NDArray[np.uint8]) -> Rows:
        """Rows of `keys` (n, 16); NO_ROW where absent. No Python loop over keys."""
        return self.find(as_u64_pairs(keys))

    @property
    def free_rows(self) -> int:
        """Rows that `insert` can give without growing."""
        return self._free_count

    def grow_for(self, count: int) -> None:
        """Grow, up to `max_pages`, if there are fewer free rows than that. Raises TableError when
        memory is out."""
        if count > self._free_count:
            wanted = max(2 * self.capacity, self.pages + count)
            self._grow(min(1 << (wanted - 1).bit_length(), self.max_pages))

    def insert(self, keys: NDArray[np.uint8]) -> Rows:
        """New rows for keys that are absent and distinct; state FREE until the caller sets it.

        Raises TableError when the table is at `max_pages` or memory is out.
        """
        pairs = as_u64_pairs(keys)
        words = np.repeat(_BLANK, len(pairs), axis=0)
        words[:, _KEY_WORD : _KEY_WORD + 2] = pairs
        return self._insert(self._take_rows(len(pairs)), words)

    def insert_records(self, records: NDArray[Any], state: State) -> Rows:
        """The same with whole records, from `blank_records` or at least with a key, which are in
        this state at once (what they say of it and of `seq` does not count, and is written over).
        Their rows, in order."""
        # The next rows are those with the lowest numbers, the lowest last.
        rows = np.ascontiguousarray(self._take_rows(len(records))[::-1])
        check_transition(self.state[rows], state)
        records["state"] = int(state)
        return self._insert(rows, as_words(records))

    @staticmethod
    def blank_records(count: int) -> NDArray[Any]:
        """Records with nothing in them and no place."""
        return _as_records(np.repeat(_BLANK, count, axis=0))

    def _take_rows(self, count: int) -> Rows:
        self.grow_for(count)
        if count > self._free_count:
            raise TableError(f"the page table is full at {self.max_pages} pages")
        if self._tombs > int(self.header["index_slots"][0]) // 8:
            self._rebuild(int(self.header["index_slots"][0]))
        self._free_count -= count
        return self._free[self._free_count : self._free_count + count].copy()

    def _insert(self, rows: Rows, words: NDArray[np.uint64]) -> Rows:
        """Records given as words, each written in one piece: numpy walks over the fields of one by
        one otherwise, and over the whole of the table for each of them."""
        for first in range(0, len(rows), AT_ONCE):
            some = rows[first : first + AT_ONCE]
            with self.changing(some):
                part = words[first : first + AT_ONCE]
                _as_records(part)["seq"] = self.seq[some]
                self._words[some] = part
        self._link(rows)
        self.pages += len(rows)
        self.header["pages"] = self.pages
        return rows

    def unlink(self, rows: Rows) -> None:
        """Take rows out of the index: lookups miss from now on. The rows stay taken."""
        self._index.unlink(rows)
        self._tombs += len(rows)

    def free(self, rows: Rows) -> None:
        """Give unlinked rows back; they become FREE."""
        self.set_state(rows, State.FREE)
        self._free[self._free_count : self._free_count + len(rows)] = rows
        self._free_count += len(rows)
        self.pages -= len(rows)
        self.header["pages"] = self.pages

    def set_state(self, rows: Rows, new: State) -> None:
        """Change state along the table of allowed transitions; StateError otherwise."""
        check_transition(self.state[rows], new)
        self.seq[rows] += np.uint32(1)
        self.state[rows] = int(new)
        self.seq[rows] += np.uint32(1)

    def changing(self, rows: Rows) -> AbstractContextManager[None]:
        """Seqlock around a change of several fields of `rows`."""
        return _Changing(self.seq, rows)

    def vouch(self, rows: Rows, checksums: NDArray[np.uint64]) -> None:
        """What the bytes of these pages are, for good; key, parent, size and depth are set. Inside
        `changing`."""
        self.checksum[rows] = checksums
        self.seal[rows] = seals(_as_records(self._words[rows]))

    def has(self, rows: Rows, flag: Flag) -> NDArray[np.bool_]:
        set_: NDArray[np.bool_] = (self.flags[rows] & int(flag)) != 0
        return set_

    def raise_flag(self, rows: Rows, flag: Flag) -> None:
        self.flags[rows] |= int(flag)

    def clear_flag(self, rows: Rows, flag: Flag) -> None:
        self.flags[rows] &= np.uint8(255 - flag)

    def live_rows(self) -> Rows:
        """All rows that hold a page or a reservation."""
        return np.flatnonzero(self.state[: self.capacity] != int(State.FREE)).astype(np.uint32)

    def close(self, *, keep: bool = False) -> None:
        """Remove the file, or leave it to the next process (`keep`). Readers that mapped it keep
        what they see."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            path = self._draft or (None if keep else self.path)
            if path is not None:
                path.unlink(missing_ok=True)

    def _link(self, rows: Rows) -> None:
        """Into the index, with another seed where this one crowds it."""
        if self._linked(rows):
            return
        slots = int(self.header["index_slots"][0])
        old = self.index[:slots]
        known = np.union1d(old[old < TOMB], rows).astype(np.uint32)
        self._rebuild(slots, known, new_seed())

    def _linked(self, rows: Rows, *, patient: bool = False) -> bool:
        """False: given up, with some of them in. `patient`: however long it takes."""
        done, tombs = self._index.link(rows, patient=patient)
        self._tombs -= tombs
        return done

    def _grow(self, capacity: int) -> None:
        if capacity <= self.capacity:
            return
        slots, before = 1 << (2 * capacity - 1).bit_length(), int(self.header["index_slots"][0])
        records_start = HEADER_BYTES + self.capacity * RECORD.itemsize
        index_start = HEADER_BYTES + self.max_pages * RECORD.itemsize
        # What is there already is not asked for again: tmpfs would look at each page of it.
        self._back(records_start, (capacity - self.capacity) * RECORD.itemsize)
        self._back(index_start + 4 * before, 4 * (slots - before))
        fresh = np.arange(capacity - 1, self.capacity - 1, -1, dtype=np.uint32)
        stack = np.empty(capacity, dtype=np.uint32)
        stack[: fresh.size] = fresh
        stack[fresh.size : fresh.size + self._free_count] = self._free[: self._free_count]
        self._free = stack
        self._free_count += fresh.size
        self.capacity = capacity
        self.header["capacity"] = capacity
        self._rebuild(slots)

    def _rebuild(self, slots: int, rows: Rows | None = None, seed: int | None = None) -> None:
        """Sweep the tombstones (and take a new size, a new seed). Unlinked rows stay out.
        `rows`: those that are to be in it, where the index does not say."""
        if rows is None:
            old = self.index[: int(self.header["index_slots"][0])]
            rows = old[old < TOMB].copy()
        self.header["index_seq"] += np.uint64(1)
        self.header["index_slots"] = slots
        if seed is not None:
            self.header["hash_seed"] = seed
        self.index[:slots] = EMPTY
        self._tombs = 0
        # Nobody can have chosen keys against a seed that is new.
        self._linked(rows, patient=True)
        self.header["index_seq"] += np.uint64(1)

    def _back(self, offset: int, length: int) -> None:
        if self._fd < 0 or not length:
            return
        try:
            os.posix_fallocate(self._fd, offset, length)
        except OSError as error:
            raise TableError(
                f"no memory for the page table at {self.path}: {error.strerror};"
                f" it needs {length} more bytes of tmpfs"
            ) from error
