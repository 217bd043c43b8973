"""What moving bytes costs, per pair of tiers: bandwidth and overhead per transfer, measured online.

Each finished move gives (bytes, transfers, seconds). The model is seconds = bytes / B + w *
transfers, fitted by least squares in which old measurements fade by `FADE` per new one. A
measurement more than `OUTLIER` times what the model expects is clipped to that (a pause of the
machine is not bandwidth), so a real slowdown is believed after a few measurements, a single stall
is not. Until `ENOUGH` measurements the defaults hold; a fit that makes no sense (negative,
or all moves of one size, so that B and w cannot be told apart) keeps the default w and fits B.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier_agent.value.classic import load_seconds

FADE = 0.98
OUTLIER = 8.0
ENOUGH = 8
FLOOR_BANDWIDTH = 1e6
CEILING_BANDWIDTH = 1e13


@dataclass(frozen=True, slots=True)
class Cost:
    """`bandwidth` bytes per second, `overhead` seconds per transfer."""

    bandwidth: float
    overhead: float

    def seconds(self, size_bytes: int, transfer_bytes: int) -> float:
        return load_seconds(size_bytes, self.bandwidth, self.overhead, transfer_bytes)


DEFAULTS: dict[str, Cost] = {
    "l0->engine": Cost(1e12, 5e-6),
    "l1->engine": Cost(10e9, 20e-6),
    "l2->l1": Cost(2e9, 100e-6),
    "l1->l2": Cost(1e9, 100e-6),
    "l0->l1": Cost(10e9, 20e-6),
    "l1->l0": Cost(10e9, 20e-6),
}
"""Assumed until measured."""


@dataclass(slots=True)
class _Fit:
    default: Cost
    count: int = 0
    xx: float = 0.0
    xn: float = 0.0
    nn: float = 0.0
    xt: float = 0.0
    nt: float = 0.0
    _solved: Cost | None = None

    def add(self, size: float, transfers: float, seconds: float) -> None:
        if self.count >= ENOUGH:
            cost = self.solve()
            expected = size / cost.bandwidth + cost.overhead * transfers
            seconds = min(seconds, OUTLIER * expected)
        for name, value in (
            ("xx", size * size),
            ("xn", size * transfers),
            ("nn", transfers * transfers),
            ("xt", size * seconds),
            ("nt", transfers * seconds),
        ):
            setattr(self, name, FADE * getattr(self, name) + value)
        self.count += 1
        self._solved = None

    def cost(self) -> Cost:
        """What was measured comes to; asked for with every lookup."""
        if self._solved is None:
            self._solved = self.solve()
        return self._solved

    def solve(self) -> Cost:
        if self.count < ENOUGH:
            return self.default
        determinant = self.xx * self.nn - self.xn * self.xn
        if determinant > 1e-6 * self.xx * self.nn:
            per_byte = (self.xt * self.nn - self.nt * self.xn) / determinant
            overhead = (self.nt * self.xx - self.xt * self.xn) / determinant
            if per_byte > 0 and overhead >= 0:
                return Cost(_bounded(1 / per_byte), overhead)
        overhead = self.default.overhead
        per_byte = (self.xt - overhead * self.xn) / self.xx
        if per_byte <= 0:  # faster than the default overhead alone: all of it is per byte
            overhead, per_byte = 0.0, self.xt / self.xx
        return Cost(_bounded(1 / per_byte if per_byte > 0 else CEILING_BANDWIDTH), overhead)


def _bounded(bandwidth: float) -> float:
    return min(max(bandwidth, FLOOR_BANDWIDTH), CEILING_BANDWIDTH)


@dataclass(slots=True)
class CostModel:
    """Costs of all pairs. Mutable, owned by the cache thread."""

    transfer_bytes: int = 1 << 20
    _fits: dict[str, _Fit] = field(
        default_factory=lambda: {pair: _Fit(cost) for pair, cost in DEFAULTS.items()}
    )

    def measured(self, pair: str, pages: int, page_bytes: int, seconds: float) -> None:
        """A move of `pages` pages took `seconds`."""
        if pages <= 0 or seconds <= 0:
            return
        transfers = pages * -(-page_bytes // self.transfer_bytes)
        self._fits[pair].add(float(pages * page_bytes), float(transfers), seconds)

    def cost(self, pair: str) -> Cost:
        return self._fits[pair].cost()

    def load_seconds(self, tier: int, page_bytes: int) -> float:
        """T_load of one page from `tier` to the engine: from L2 by way of L1."""
        if tier == 0:
            return self.cost("l0->engine").seconds(page_bytes, self.transfer_bytes)
        seconds = self.cost("l1->engine").seconds(page_bytes, self.transfer_bytes)
        if tier == 2:
            seconds += self.cost("l2->l1").seconds(page_bytes, self.transfer_bytes)
        return seconds
