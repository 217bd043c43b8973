"""The page table as it lies in shared memory, and the batch lookup in it: common to its writer
(`page_table`) and its readers (`table_reader`). The layout is described in `page_table`."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.record import RECORD, Rows
from kvtier_agent.cache.table_index import Layout, index_over

MAGIC = b"KVTIERPT"
LAYOUT_VERSION = 2
HEADER_BYTES = 8192
INDEX_PER_PAGE = 4  # room for a power of two that keeps the index at most half full

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


def index_layout(max_pages: int) -> Layout:
    """Where the index of a table finds what it needs."""
    fields = dict(HEADER.fields or {})
    return Layout(
        records=HEADER_BYTES,
        max_pages=max_pages,
        index=HEADER_BYTES + max_pages * RECORD.itemsize,
        places=INDEX_PER_PAGE * max_pages,
        seed=fields["hash_seed"][1],
        slots=fields["index_slots"][1],
    )


class TableView:
    """A mapped table file: its arrays and the batch lookup, common to writer and readers."""

    def __init__(self, buffer: mmap.mmap, max_pages: int) -> None:
        self.max_pages = max_pages
        self._buffer = buffer
        layout = index_layout(max_pages)
        self.header: NDArray[Any] = np.frombuffer(buffer, dtype=HEADER, count=1)
        self.records: NDArray[Any] = np.frombuffer(
            buffer, dtype=RECORD, count=max_pages, offset=HEADER_BYTES
        )
        self.index: NDArray[np.uint32] = np.frombuffer(
            buffer, dtype="<u4", count=layout.places, offset=layout.index
        )
        for name in RECORD.names or ():
            setattr(self, name, self.records[name])
        self.key: NDArray[np.uint64] = self.records["key"]
        self._index = index_over(buffer, layout)

    def find(self, pairs: NDArray[np.uint64]) -> Rows:
        """Rows of keys given as (n, 2) uint64; NO_ROW where absent."""
        return self._index.find(pairs)

    def states(self, pairs: NDArray[np.uint64]) -> NDArray[np.uint8]:
        """The state of each key's page, FREE where there is none."""
        return self._index.states(pairs)
