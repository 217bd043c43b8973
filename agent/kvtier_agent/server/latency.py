"""Latencies of moves between tiers: Prometheus' buckets, and fine ones for percentiles.

Only the cache thread writes; ``frozen`` gives other threads a copy. Fine buckets grow by a tenth
each from a microsecond on, so a percentile read from them is at most a tenth too high.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field
from typing import Final

BOUNDS: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5)
"""Upper bounds of ``kv_offload_latency_seconds``, seconds."""
_FIRST: Final = 1e-6
_GROWTH: Final = math.log(1.1)
_FINE: Final = 200


@dataclass
class Latency:
    """One pair of tiers. ``buckets`` are cumulative over ``BOUNDS`` and +Inf."""

    count: int = 0
    total_seconds: float = 0.0
    bytes: int = 0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    fine: list[int] = field(default_factory=lambda: [0] * _FINE)

    def observe(self, seconds: float, size: int) -> None:
        """One batch of ``size`` bytes took ``seconds``, its wait in the queue included."""
        self.count += 1
        self.total_seconds += seconds
        self.bytes += size
        for i in range(bisect.bisect_left(BOUNDS, seconds), len(self.buckets)):
            self.buckets[i] += 1
        place = math.ceil(math.log(max(seconds, _FIRST) / _FIRST) / _GROWTH)
        self.fine[min(place, _FINE - 1)] += 1

    def percentile(self, percent: float) -> float | None:
        """The latency that ``percent`` of the batches did not exceed, seconds; None without any."""
        if not self.count:
            return None
        wanted = max(1, math.ceil(self.count * percent / 100))
        seen = 0
        for place, n in enumerate(self.fine):
            seen += n
            if seen >= wanted:
                return _FIRST * math.exp(place * _GROWTH)
        return None

    def frozen(self) -> Latency:
        """A copy for another thread."""
        return Latency(
            self.count, self.total_seconds, self.bytes, list(self.buckets), list(self.fine)
        )
