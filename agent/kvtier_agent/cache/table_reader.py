"""Reading another process's page table: for clients and `kvtier inspect`. Never writes.

`index_seq` in the header is odd during a rebuild of the index, `seq` in a record is odd while that
record changes; a reader that sees an odd or changed number looks again, a bounded number of times.
A rebuild for millions of pages takes most of a second: between two looks at the index it sleeps.
"""

from __future__ import annotations

import mmap
import os
import stat
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.record import NO_ROW, RECORD, Rows, State, as_u64_pairs
from kvtier_agent.cache.table_notes import START, SUSPECTS, read_note
from kvtier_agent.cache.table_view import (
    HEADER,
    HEADER_BYTES,
    INDEX_PER_PAGE,
    LAYOUT_VERSION,
    MAGIC,
    TableError,
    TableView,
)

REBUILD_SECONDS = 0.02


class TableReader(TableView):
    """Read-only view of another process's table. Answers are snapshots; state may have moved on."""

    def __init__(self, path: Path) -> None:
        """Raises TableError when `path` is no table of this layout."""
        try:
            # A pipe in its place would hold up the open without O_NONBLOCK.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise TableError(f"cannot open the page table {path}: {error.strerror}") from error
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise TableError(f"{path} is no page table: it is no file")
            head = os.pread(fd, HEADER.itemsize, 0)
            if len(head) < HEADER.itemsize:
                raise TableError(f"{path} is no page table: it is too short")
            header = np.frombuffer(head, dtype=HEADER)[0]
            if bytes(header["magic"]) != MAGIC:
                raise TableError(f"{path} is no page table of kvtier")
            version = int(header["layout_version"])
            if version != LAYOUT_VERSION or int(header["record_bytes"]) != RECORD.itemsize:
                raise TableError(
                    f"{path} has layout version {version}; this program reads {LAYOUT_VERSION}."
                    " Use the kvtier version of the agent"
                )
            max_pages = int(header["max_pages"])
            size = HEADER_BYTES + max_pages * (RECORD.itemsize + 4 * INDEX_PER_PAGE)
            if os.fstat(fd).st_size < size:
                raise TableError(f"{path} is cut short: {size} bytes expected")
            buffer = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        except OSError as error:
            raise TableError(f"cannot read the page table {path}: {error.strerror}") from error
        finally:
            os.close(fd)
        super().__init__(buffer, max_pages)

    @property
    def boot_id(self) -> bytes:
        return bytes(self.header["boot_id"][0])

    @property
    def restart(self) -> dict[str, Any]:
        """How the writer's process started: `taken_over`, `dropped` by reason, `cold` (why)."""
        note = read_note(bytes(self._buffer[:HEADER_BYTES]), START)
        return note if isinstance(note, dict) else {}

    @property
    def suspects(self) -> dict[str, Any]:
        """Segments of L2 that get nothing new until they were tested: their `count`, and the
        `numbers` of the first of them."""
        note = read_note(bytes(self._buffer[:HEADER_BYTES]), SUSPECTS)
        return note if isinstance(note, dict) else {"count": 0, "numbers": []}

    def lookup(self, keys: NDArray[np.uint8], attempts: int = 100) -> NDArray[Any]:
        """Records (copies) of `keys`, state FREE where absent."""
        pairs = as_u64_pairs(keys)
        for _ in range(attempts):
            before = int(self.header["index_seq"][0])
            if before % 2 == 0:  # else the index may be of the new size and not yet filled
                rows = self.find(pairs)
                if before == int(self.header["index_seq"][0]):
                    break
            time.sleep(REBUILD_SECONDS)
        else:
            raise TableError("the page table is being rebuilt without end")
        out = np.zeros(len(pairs), dtype=RECORD)
        there = np.flatnonzero(rows != NO_ROW)
        copies = self._stable(rows[there], attempts)
        same = (copies["key"] == pairs[there]).all(axis=1)
        out[there[same]] = copies[same]
        return out

    def scan(self, attempts: int = 100) -> NDArray[Any]:
        """Copies of all records in use, each consistent in itself."""
        capacity = int(self.header["capacity"][0])
        state = self.records["state"][:capacity]
        rows = np.flatnonzero(state != State.FREE).astype(np.uint32)
        copies = self._stable(rows, attempts)
        live: NDArray[Any] = copies[copies["state"] != State.FREE]
        return live

    def _stable(self, rows: Rows, attempts: int) -> NDArray[Any]:
        out = np.zeros(len(rows), dtype=RECORD)
        left = np.arange(len(rows))
        for _ in range(attempts):
            if not left.size:
                return out
            before = self.records["seq"][rows[left]]
            copies = self.records[rows[left]]
            after = self.records["seq"][rows[left]]
            good = (before == after) & (before % 2 == 0)
            out[left[good]] = copies[good]
            left = left[~good]
        return out  # what never held still stays FREE: the writer died inside a change
