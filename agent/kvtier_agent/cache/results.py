"""What the cache answers: frozen results and their status codes. One explicit status per key."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
U64 = NDArray[np.uint64]

HBM, DRAM, NVME = 0, 1, 2
"""Tier numbers, as in the metrics."""
MISS = 255
"""In place of a tier: the page is not there (or came too late, or was bad)."""


class PutStatus(IntEnum):
    """What became of one key of a `reserve`."""

    OFFERED = 0  # a slot is reserved: write the bytes, then commit
    EXISTS = 1  # already held; nothing to do
    REFUSED_VALUE = 2  # worth less than every tier's threshold
    REFUSED_SPACE = 3  # no slot free right now; nothing is waited for
    BUSY = 4  # another client is writing it, or it is just being dropped
    REFUSED_CLOSED = 5  # no policy in force: the cache admits nothing
    REFUSED_QUOTA = 6  # its tenant has all that the policy gives it, and nothing of that can go now


class CommitStatus(IntEnum):
    """What became of one key of a `commit`."""

    COMMITTED = 0
    UNKNOWN = 1  # this client holds no reservation for the key (expired, aborted, never made)


class PinStatus(IntEnum):
    """What became of one key of a `pin`."""

    PINNED = 0  # it stays until `unpin`; one in NVMe is on its way up
    ABSENT = 1  # not in the cache, or still being written
    REFUSED_SPACE = 2  # pins have their share of the tier, or DRAM has no slot to read it into
    REFUSED_LIMIT = 3  # this client has as many pins as one may have


class DeleteStatus(IntEnum):
    """What became of one key of a `delete`."""

    DELETED = 0  # nobody held it: its bytes go with the next batch
    MARKED = 1  # not found any more; its bytes go with the last lease, pin or move
    ABSENT = 2  # not in the cache, or still being written


@dataclass(frozen=True, slots=True, eq=False)
class LookupResult:
    """`tiers`: uint8 (n,), the tier of each page or MISS. `prefix`: leading pages that are hits."""

    tiers: U8
    prefix: int


@dataclass(frozen=True, slots=True, eq=False)
class PutResult:
    """Per key: `status` (PutStatus), `tier` whose arena it was offered in (0, 1; MISS if none),
    `offset` in that arena in bytes (valid where OFFERED)."""

    status: U8
    tier: U8
    offset: U64


@dataclass(frozen=True, slots=True, eq=False)
class PinResult:
    """Per key: `status` (PinStatus), and `tier` where the page was (MISS: absent)."""

    status: U8
    tier: U8


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """The answer to a `load`, per key in the order asked.

    `lease`: what `release` wants. `done`: False while pages are on their way from L2; the finished
    ticket (same lease) then comes from `move_done` or `tick`. `tier`: where the hit was (MISS: not
    there, late or bad). `arena`: whose arena holds the bytes (0 or 1; MISS where the page is a
    miss). `offset`: bytes into that arena. `checksum`: xxh3-64 of the `page_bytes` payload; the
    reader verifies its own copy. A lease with no hit at all is still released.
    """

    lease: int
    client: int
    done: bool
    tier: U8
    arena: U8
    offset: U64
    checksum: U64


@dataclass(frozen=True, slots=True)
class GateAnswer:
    """`load`: how many leading pages are worth loading (0 = recompute); `reason`: one word."""

    load: int
    reason: str


@dataclass(frozen=True, slots=True)
class Registration:
    """The answer to a client's geometry: accepted, or the reason in one sentence."""

    accepted: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TierSnapshot:
    """One tier. `capacity_bytes` in force (a multiple of the slot), `used_bytes` by slots taken
    (copies on their way included), `pages` resident, `pinned_pages` held by leases and
    pins, `moving_pages` in or out right now, `kept_pages` pinned by clients."""

    name: str
    capacity_bytes: int
    used_bytes: int
    pages: int
    pinned_pages: int
    moving_pages: int
    high_water_bytes: int
    low_water_bytes: int
    kept_pages: int = 0


@dataclass(frozen=True, slots=True)
class FrozenSnapshot:
    """A frozen prefix: `exempt_bytes` held out of replacement, of `max_bytes`; pages past the
    budget are ordinary: `ordinary_pages`."""

    name: str
    max_bytes: int
    exempt_bytes: int
    exempt_pages: int
    ordinary_pages: int


@dataclass(frozen=True, slots=True)
class TenantSnapshot:
    """A tenant with a quota. `used_bytes`, `quota_bytes`: by tier; None: no bound. `refused_pages`
    of puts and `evicted_pages` for the quota's sake, since it has one."""

    name: str
    used_bytes: tuple[int, int, int]
    quota_bytes: tuple[int | None, int | None, int | None]
    refused_pages: int
    evicted_pages: int


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """The cache at one moment; plain numbers, safe to hand to another thread.

    `counters` are cumulative since this process started; their names are the fields of
    `counters.Counters`.
    """

    now: float
    tiers: tuple[TierSnapshot, ...]
    frozen: tuple[FrozenSnapshot, ...]
    counters: dict[str, int]
    pressure: str
    admitting: bool
    page_table_bytes: int
    pages: int
    leases: int
    reservations: int
    clients: int
    pinned_pages: int
    pending_tickets: int
    write_queue_bytes: int
    suspected_segments: int
    dead_bytes: int
    geometry: dict[str, int] = field(default_factory=dict)
    volumes: dict[str, str] = field(default_factory=dict)
    tenants: tuple[TenantSnapshot, ...] = ()
    client_pins: int = 0
    marked_pages: int = 0
    """Pages that were deleted, or found bad, and whose bytes are not free yet."""
