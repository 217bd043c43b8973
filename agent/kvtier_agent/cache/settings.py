"""What the cache obeys: `Behaviour` (from the policy), `Budgets` (bytes per tier), `CacheSettings`
(knobs of this process). All plain and frozen; `kvtier_agent.node` builds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MIB = 1 << 20
GIB = 1 << 30

Durability = Literal["none", "async", "sync"]


class BehaviourError(ValueError):
    """A value out of its bounds; the message says what to write instead."""


def _bounds(owner: object, name: str, low: float, high: float) -> None:
    value = getattr(owner, name)
    if not low <= value <= high:
        raise BehaviourError(f"{name} is {value}; write a value from {low} to {high}")


@dataclass(frozen=True, slots=True)
class FrozenPrefix:
    """A named prefix that stays in L0, up to `max_bytes` (default 2 GiB). Requests name it, or
    its pages are listed by key (16 bytes each)."""

    name: str
    max_bytes: int = 2 * GIB
    page_keys: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class TenantQuota:
    """Most that a tenant's pages may take of each tier of this trust domain, percent of its slots,
    0 to 100; None = no bound."""

    tenant: str
    hbm_percent: int | None = None
    dram_percent: int | None = None
    nvme_percent: int | None = None

    def __post_init__(self) -> None:
        for name in ("hbm_percent", "dram_percent", "nvme_percent"):
            if getattr(self, name) is not None:
                _bounds(self, name, 0, 100)

    @property
    def percents(self) -> tuple[int | None, int | None, int | None]:
        """By tier number."""
        return self.hbm_percent, self.dram_percent, self.nvme_percent


@dataclass(frozen=True, slots=True)
class Behaviour:
    """The part of a policy that the cache obeys (names as in the policy, units in the name)."""

    threshold_microseconds_per_mib: tuple[int, int, int] = (0, 0, 0)
    """Floor on V/size per tier (hbm, dram, nvme), microseconds per MiB; 0 = none."""
    prior_reuse_percent: int = 30
    """Reuse probability of a page without history, percent, 0 to 100."""
    cool_down_seconds: float = 5.0
    """A demoted page does not come back up before this, seconds, 0 to 86400."""
    tighten_percent: int = 90
    """L0 use above which newcomers of low value go one tier lower, percent, 10 to 100."""
    demote_percent: int = 95
    """L0 use above which every unpinned, unfrozen page is demoted, percent, > tighten, to 100."""
    transfer_bytes: int = MIB
    """Bytes of one transfer unit, 4 KiB to 64 MiB (policy: 256Ki to 1Mi)."""
    slo_seconds: float = 0.8
    """P99 objective for the first token, seconds, above 0."""
    frozen: tuple[FrozenPrefix, ...] = ()
    quotas: tuple[TenantQuota, ...] = ()
    durability: Durability = "async"
    """none: L2 is swept at start. async: L2 survives a restart. sync: and each batch is flushed
    to the device before it counts as written."""
    admitting: bool = True
    """False while no policy is in force: serve what is held, admit nothing."""

    def __post_init__(self) -> None:
        _bounds(self, "prior_reuse_percent", 0, 100)
        _bounds(self, "cool_down_seconds", 0, 86400)
        _bounds(self, "tighten_percent", 10, 100)
        _bounds(self, "demote_percent", self.tighten_percent, 100)
        _bounds(self, "transfer_bytes", 4096, 64 * MIB)
        _bounds(self, "slo_seconds", 0.001, 3600)


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes per tier. `l0_bytes` 0 = shape `engine`: the engine's own pool is L0. `l2_bytes` 0 =
    no NVMe tier. `volumes`: names, in the policy's order; `reserve_percent`: of each volume's
    file system, kept free."""

    l0_bytes: int
    l1_bytes: int
    l2_bytes: int = 0
    volumes: tuple[str, ...] = ()
    reserve_percent: int = 10

    def __post_init__(self) -> None:
        _bounds(self, "l0_bytes", 0, 1 << 50)
        _bounds(self, "l1_bytes", 0, 1 << 50)
        _bounds(self, "l2_bytes", 0, 1 << 60)
        _bounds(self, "reserve_percent", 0, 90)


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Knobs of one process."""

    lease_seconds: float = 60.0
    """A lease or a reservation not given back by then is taken back, seconds, 1 to 3600."""
    prior_weight: int = 4
    """How many accesses the prior reuse probability is worth, 1 to 1000."""
    recompute_tokens_per_second: float = 20_000.0
    """Prefill speed assumed until an engine reports its own, tokens per second, above 0."""
    parity_tokens: int = 30_500
    """Depth at which attention costs as much as the rest of the model, tokens, from 1."""
    dram_high_percent: int = 95
    """L1 use above which its coldest pages go down, percent, 10 to 100."""
    dram_low_percent: int = 90
    """... down to this, percent, 5 to high. Small tiers keep at least an eighth (up to 32 slots)
    free above the first line and a quarter (up to 64) above the second."""
    dram_load_reserve_percent: int = 2
    """Part of L1 that puts may not take, kept for pages read from L2, percent, 0 to 50."""
    write_queue_bytes: int = 256 * MIB
    """Bound on bytes on their way to L2; at 90 % of it, or with half of L1's slots on their way,
    nothing more is queued, and where L1 needs slots its coldest pages are dropped. A larger page
    goes alone."""
    compaction_bytes_per_second: int = 128 * MIB
    """Bound on what compaction writes to NVMe, bytes per second, 0 (nothing is moved, pages of a
    segment that is emptied are dropped) to 2^40. It counts as writes like any other."""
    compaction_hot_percent: int = 80
    """A page of a segment that is emptied is moved if it is among this percent of L2's most
    recently touched pages, 0 (never) to 90; the others are dropped. More: closer to strict LRU, at
    the cost of more bytes written; near 100 segments are full of what is to be moved, and little
    is gained by emptying one."""
    move_bytes: int = 16 * MIB
    """A move carries at most this many bytes (at least one page)."""
    max_leases_per_client: int = 4096
    """Leases one client may hold at a time, 1 to 10^6; a load past it is a miss."""
    pin_seconds: float = 60.0
    """The pins of a client of which nothing was heard for so long end, seconds, 1 to 3600."""
    pin_percent: int = 25
    """Part of the slots of L0 and of L1 that may be pinned, percent, 0 (no pins) to 90."""
    max_pins_per_client: int = 16_384
    """Pages one client may have pinned at a time, 0 to 10^6."""
    max_pages: int = 1 << 24
    """Most pages the page table may grow to (128 bytes each), 1024 to 2^28. L2 gets no more slots
    than that leaves for it."""

    def __post_init__(self) -> None:
        _bounds(self, "pin_seconds", 1, 3600)
        _bounds(self, "pin_percent", 0, 90)
        _bounds(self, "max_pins_per_client", 0, 10**6)
        _bounds(self, "compaction_bytes_per_second", 0, 1 << 40)
        _bounds(self, "compaction_hot_percent", 0, 90)
