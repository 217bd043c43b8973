"""What the agent did during a run: its own cumulative counters, read before and after.

- *written*: pages (and payload bytes) that entered a tier, by puts and by moves between tiers.
- *evictions*: pages that left a tier to make room, down to the next or out of the cache; for L2
  there is only out. *dropped*: those of them that went out of the cache.
- *latency*: of the moves between tiers, queueing included, as the agent measured it since it
  started (percentiles cannot be subtracted; an agent of the replay's own starts with the run).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtier_agent.replay.report import TIERS, Quantiles
from kvtier_agent.server.client import Client

_SETTLE_SECONDS = 10.0
"""How long a reading waits for pages on their way."""

_FRESH_SECONDS = 0.6
"""The agent's figures may be half a second old."""


@dataclass(frozen=True, slots=True)
class Readings:
    """Cumulative counts of one agent."""

    pages_written: Mapping[str, int] = field(default_factory=dict)
    bytes_written: Mapping[str, int] = field(default_factory=dict)
    evictions: Mapping[str, int] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    quarantined: int = 0
    latency: Mapping[str, Quantiles] = field(default_factory=dict)

    def __sub__(self, before: Readings) -> Readings:
        """What happened since `before`."""
        return Readings(
            _less(self.pages_written, before.pages_written),
            _less(self.bytes_written, before.bytes_written),
            _less(self.evictions, before.evictions),
            _less(self.dropped, before.dropped),
            self.quarantined - before.quarantined,
            self.latency,
        )


def read_agent(client: Client) -> Readings:
    """The counters now, once the agent is at rest (or has not come to rest in ten seconds)."""
    return readings(settled_stats(client))


def settled_stats(client: Client) -> dict[str, Any]:
    """`Client.stats` once two in a row agree and nothing is on its way."""
    end = time.monotonic() + _SETTLE_SECONDS
    last: dict[str, Any] = {}
    while True:
        stats = client.stats()
        moving = sum(tier["moving_pages"] for tier in stats.get("tiers", {}).values())
        same = stats.get("counters") == last.get("counters") and bool(last)
        if (same and not moving) or time.monotonic() > end:
            return stats
        last = stats
        time.sleep(_FRESH_SECONDS)


def readings(stats: Mapping[str, Any]) -> Readings:
    """Readings from the answer of `Client.stats`."""
    counters: Mapping[str, int] = stats.get("counters", {})
    evicted = {tier: counters.get(f"evicted_{tier}", 0) for tier in TIERS}
    return Readings(
        pages_written={tier: counters.get(f"stored_{tier}", 0) for tier in TIERS},
        bytes_written={tier: counters.get(f"stored_bytes_{tier}", 0) for tier in TIERS},
        evictions={tier: evicted[tier] + counters.get(f"demoted_{tier}", 0) for tier in TIERS},
        dropped=evicted,
        quarantined=counters.get("quarantined_pages", 0),
        latency={
            pair: Quantiles(float(one["p50"]), float(one["p99"]))
            for pair, one in stats.get("latency", {}).items()
            if one.get("count")
        },
    )


def _less(after: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    return {name: value - before.get(name, 0) for name, value in after.items()}
