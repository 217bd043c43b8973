"""What other threads see of the cache thread: immutable copies, half a second old at most.

``DomainSnapshot.counters`` is the one list of cumulative counts that metrics, status and
``Client.stats`` are made from: the cache's own (``cache.counters``), with hits and misses as
settled by ``accounting``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.results import CacheSnapshot
from kvtier_agent.server.accounting import Tally
from kvtier_agent.server.latency import Latency
from kvtier_agent.storage.arena_watch import ArenaLoss
from kvtier_agent.storage.nvme import JournalFigures


@dataclass(frozen=True, slots=True)
class VolumeFigures:
    """One volume of a domain. ``used_bytes``: of segments; ``trouble``: the reason why it takes no
    writes (``VolumeFull``, ``VolumeReadOnly``, ``VolumeUnusable``), empty where it does."""

    name: str
    used_bytes: int
    trouble: str


@dataclass(frozen=True, slots=True, eq=False)
class DomainSnapshot:
    """One trust domain. ``latency`` is keyed by (source layer, target layer)."""

    name: str
    geometry: Geometry | None
    cache: CacheSnapshot
    counters: Mapping[str, int]
    latency: Mapping[tuple[int, int], Latency]
    clients: int
    engine_pool_bytes: int
    """KV pools of the engines that are connected, summed."""
    parked_loads: int
    open_questions: int
    messages: int
    refused_messages: Mapping[str, int]
    dropped_replies: int
    refused_lifelines: int
    ended_connections: int
    failed_handshakes: int
    volumes: tuple[VolumeFigures, ...] = ()
    io_faults: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(operation, fault) -> how often a drive did that; see `storage.io_errors`."""
    nvme_engine: str = "calls"
    """How pages go to drives: `Core.nvme_engine`."""
    journal: JournalFigures = field(default_factory=JournalFigures)
    lost_memory: tuple[ArenaLoss, ...] = ()
    """What clients took away from each arena by cutting its file short."""
    restart: str = ""
    """What was taken over from the process before, for people; empty where nothing was there."""


@dataclass(frozen=True, slots=True, eq=False)
class ServerSnapshot:
    """All domains at one moment (seconds on the loop's monotonic clock)."""

    now: float
    boot: int
    posted_calls: int
    domains: Mapping[str, DomainSnapshot]


def merged_counters(cache: Mapping[str, int], tally: Tally) -> dict[str, int]:
    """The cache's counters with hits and misses as settled: hits + misses = pages asked."""
    counters = dict(cache)
    for layer in range(3):
        counters[f"hits_l{layer}"] = tally.pages[layer]
        counters[f"hit_tokens_l{layer}"] = tally.tokens[layer]
    counters["misses"] = tally.pages[3]
    counters["miss_tokens"] = tally.tokens[3]
    counters["hit_tokens"] = sum(tally.tokens[:3])
    counters["asked_pages"] = tally.asked_pages
    counters["asked_tokens"] = tally.asked_tokens
    counters["questions"] = tally.questions
    return counters


def statistics(domain: DomainSnapshot) -> dict[str, Any]:
    """The values of a ``Statistics`` reply: what a client may know about its own domain.

    ``counters``: cumulative, see above. ``tiers``: per tier name capacity_bytes, used_bytes,
    pages, pinned_pages, moving_pages. ``latency``: per "l2->l1" count, bytes, p50, p99, mean in
    seconds. ``tenants``: those with a quota, by name; lists are by tier. The rest: gauges.
    """
    cache = domain.cache
    return {
        "domain": domain.name,
        "counters": dict(domain.counters),
        "tiers": {
            tier.name: {
                "capacity_bytes": tier.capacity_bytes,
                "used_bytes": tier.used_bytes,
                "pages": tier.pages,
                "pinned_pages": tier.pinned_pages,
                "moving_pages": tier.moving_pages,
            }
            for tier in cache.tiers
        },
        "latency": {
            f"l{source}->l{target}": {
                "count": latency.count,
                "bytes": latency.bytes,
                "mean": latency.total_seconds / latency.count if latency.count else None,
                "p50": latency.percentile(50),
                "p99": latency.percentile(99),
            }
            for (source, target), latency in domain.latency.items()
        },
        "pressure": cache.pressure,
        "admitting": cache.admitting,
        "pages": cache.pages,
        "page_table_bytes": cache.page_table_bytes,
        "leases": cache.leases,
        "reservations": cache.reservations,
        "pinned_pages": cache.pinned_pages,
        "tenants": {
            tenant.name: {
                "used_bytes": list(tenant.used_bytes),
                "quota_bytes": list(tenant.quota_bytes),
                "refused_pages": tenant.refused_pages,
                "evicted_pages": tenant.evicted_pages,
            }
            for tenant in cache.tenants
        },
        "client_pins": cache.client_pins,
        "marked_pages": cache.marked_pages,
        "pending_loads": cache.pending_tickets,
        "write_queue_bytes": cache.write_queue_bytes,
        "clients": domain.clients,
        "messages": domain.messages,
        "refused_messages": dict(domain.refused_messages),
    }
