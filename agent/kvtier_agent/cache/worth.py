"""What pages are worth, by the model in force: the bridge from records to `kvtier_agent.value`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.page_table import PageTable
from kvtier_agent.cache.record import Flag, Rows
from kvtier_agent.cache.settings import Behaviour, CacheSettings
from kvtier_agent.value import classic
from kvtier_agent.value.costs import CostModel

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(slots=True)
class Worth:
    """Densities and admissions of newcomers and of residents. `rate`: tokens per second, the
    engine's own once it reported one."""

    geometry: Geometry
    behaviour: Behaviour
    settings: CacheSettings
    costs: CostModel
    rate: float

    def probability(self, table: PageTable, rows: Rows) -> Floats:
        """p of resident pages from their own history."""
        return classic.reuse_probability(
            table.hits[rows].astype(np.float64),
            self.behaviour.prior_reuse_percent / 100,
            self.settings.prior_weight,
        )

    @property
    def prior(self) -> float:
        return self.behaviour.prior_reuse_percent / 100

    def recompute(self, depth: NDArray[np.integer]) -> Floats:
        """T_recompute of full pages that start at `depth` tokens, seconds."""
        return classic.recompute_seconds(
            depth.astype(np.float64),
            self.geometry.page_tokens,
            self.rate,
            self.settings.parity_tokens,
        )

    def recompute_first(self, depth: int) -> float:
        """T_recompute of the page that starts at `depth` tokens, seconds; later ones cost more."""
        middle = depth + self.geometry.page_tokens / 2
        return self.geometry.page_tokens / self.rate * (1.0 + middle / self.settings.parity_tokens)

    def density(self, probability: Floats | float, recompute: Floats, tier: int) -> Floats:
        """VD of pages if they lay in `tier`, microseconds per MiB."""
        size = self.geometry.page_bytes
        return classic.density(probability, recompute, self.costs.load_seconds(tier, size), size)

    def admits(self, probability: Floats | float, recompute: Floats, tier: int) -> Mask:
        """Which pages `tier` takes."""
        threshold = self.behaviour.threshold_microseconds_per_mib[tier]
        if threshold == 0:
            return np.ones(recompute.shape, dtype=bool)
        return classic.admitted(self.density(probability, recompute, tier), threshold)

    def keeps(self, table: PageTable, rows: Rows, tier: int) -> Mask:
        """Which resident pages may lie in `tier` now. Exempt pages always, partial ones only in
        L0."""
        if self.behaviour.threshold_microseconds_per_mib[tier] == 0:
            taken = np.ones(len(rows), dtype=bool)
        else:
            taken = self.admits(
                self.probability(table, rows), self.recompute(table.depth[rows]), tier
            )
            taken |= table.has(rows, Flag.EXEMPT)
        if tier > 0:
            taken &= ~table.has(rows, Flag.PARTIAL)
        return taken
