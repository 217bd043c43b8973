"""Moves: what the cache wants copied, and how it went.

The cache decides and never copies. It hands out `Move`s, batches of pages between two fixed
places; the mover executes them on its own threads and hands back an `Outcome` with one status per
page. Until then the pages stay in a moving state: their slots, old and new, are taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum

import numpy as np
from numpy.typing import NDArray


class MoveKind(Enum):
    """(source tier, target tier) or an order about slots that hold no page."""

    DEMOTE = "l0->l1"
    PROMOTE = "l1->l0"
    WRITE = "l1->l2"
    READ = "l2->l1"
    PUNCH_L0 = "punch-l0"  # give the memory of free slots back
    PUNCH_L1 = "punch-l1"
    PUNCH_L2 = "punch-l2"  # give the blocks of empty segments back; `source`: their numbers
    SCRUB = "scrub-l2"  # rewrite and reread slots of an empty segment that held a bad page
    FORGET = "forget-l2"  # these slots hold no page any more
    COMPACT = "l2->l2"  # out of a segment that is being emptied

    @property
    def carries_pages(self) -> bool:
        return self in _OF_PAGES


_OF_PAGES = frozenset(
    (MoveKind.DEMOTE, MoveKind.PROMOTE, MoveKind.WRITE, MoveKind.READ, MoveKind.COMPACT)
)


LAYERED_PAGES = 128
LAYERED_BYTES = 2 << 30
"""Of a layered move, at most (a single page may be larger): units come in order within a move, so
it is as large as a load, but for what would keep others waiting too long."""


def layered_pages(page_bytes: int) -> int:
    """Pages of a layered move, at most."""
    return max(1, min(LAYERED_PAGES, LAYERED_BYTES // page_bytes))


class MoveStatus(IntEnum):
    """How one page of a move ended. Everything but OK leaves the source as it was."""

    OK = 0
    BAD_PAGE = 1  # bytes do not match their checksum or key
    IO_ERROR = 2  # EIO, short read or write, file gone
    NO_SPACE = 3  # the cap, the reserve or the file system said no
    READ_ONLY = 4  # the volume went read-only
    CANCELLED = 5  # not tried: queue bound, volume withdrawn or the mover is closing
    TARGET_ERROR = 6  # of COMPACT: read well, and EIO or a short write at its new place
    UNWRITTEN = 7  # of READ and COMPACT: a power cut kept the page from reaching its slot


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """A batch. All arrays have the same length n; `source`/`target` are slot numbers.

    rows: uint32 (n,) record rows. keys, parents: uint8 (n, 16). checksums: uint64 (n,).
    depths: uint32 (n,), tokens before the page. tenants: uint16 (n,), whose page it is
    (`quotas.tenant_number`); None: nobody's. created: seconds, the cache's clock.
    epochs, sizes: uint32 (n,), of the segment of L2 that is written to or that the order is about:
    which use of it is meant, and how many slots that use has (`SegmentPool.uses`).
    An order about empty slots sets `source`, and `epochs` and `sizes` in L2.
    layered: of READ, pages of several transfer units: the first units of all pages are read first,
    and so on, and each is announced when it has landed.
    """

    id: int
    kind: MoveKind
    rows: NDArray[np.uint32]
    source: NDArray[np.uint32]
    target: NDArray[np.uint32]
    keys: NDArray[np.uint8]
    parents: NDArray[np.uint8]
    checksums: NDArray[np.uint64]
    depths: NDArray[np.uint32]
    epochs: NDArray[np.uint32]
    sizes: NDArray[np.uint32]
    page_bytes: int
    slot_bytes: int
    created: float
    tenants: NDArray[np.uint16] | None = None
    layered: bool = False

    def __len__(self) -> int:
        return len(self.source)

    @property
    def bytes(self) -> int:
        """Bytes to be copied; an order about empty slots copies none."""
        return len(self.source) * self.page_bytes if self.kind.carries_pages else 0


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """`status`: uint8 (n,) of MoveStatus. `seconds`: time of the copy itself (waiting in the queue
    apart). `error`: the first failure, one line, empty if none."""

    status: NDArray[np.uint8]
    seconds: float
    error: str = ""

    @classmethod
    def uniform(
        cls, move: Move, status: MoveStatus, seconds: float = 0.0, error: str = ""
    ) -> Outcome:
        return cls(np.full(len(move), status, dtype=np.uint8), seconds, error)
