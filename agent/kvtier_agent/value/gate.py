"""The gate: load n pages of a found prefix, or recompute.

    load when T_load(n) + T_forward(n) <= SLO

T_load(n) is the time to bring the first n pages to the engine, T_forward(n) the prefill of all the
request's tokens that are then still missing. Every page taken adds to the first and takes from the
second. Of all n whose sum keeps the SLO the one with the least sum is answered (the larger n where
equal): loading a page that takes longer than recomputing it is never worth it.

If no n keeps the SLO, nothing is loaded (reason `slo-lost`): that is the rule as it stands, and an
objective says which requests the cache is for. If the request's length is unknown, T_forward is
only that of the found pages.

Monotone: the answer is a prefix of the chain, so a caller may always take fewer pages. The
functions take cumulative sums and cost O(pages).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Gate:
    """`load` leading pages (0 = recompute); `reason`: hit, miss, slower or slo-lost."""

    load: int
    reason: str


def decide(load: Floats, recompute: Floats, rest_seconds: float, slo_seconds: float) -> Gate:
    """How many of the found pages to load.

    `load`, `recompute`: seconds per found page, in chain order; `rest_seconds`: prefill of the
    tokens after them, needed in any case.
    """
    if not load.size:
        return Gate(0, "miss")
    total = np.zeros(load.size + 1)
    np.cumsum(load - recompute, out=total[1:])
    total += recompute.sum() + rest_seconds
    keeps = total <= slo_seconds
    if not keeps.any():
        return Gate(0, "slo-lost")
    # The largest n among the least sums: from the far end the first minimum.
    best = len(total) - 1 - int(np.argmin(np.where(keeps, total, np.inf)[::-1]))
    return Gate(best, "hit" if best else "slower")


def decide_by_counts(
    counts: Sequence[int],
    load: Sequence[float],
    first_recompute: float,
    rest_seconds: float,
    slo_seconds: float,
) -> Gate | None:
    """The answer of `decide` without a look at each page, where that is enough; else None.

    `counts`: found pages per tier; `load`: seconds per page of each tier; `first_recompute`:
    seconds of the first page, the least of all, for recomputing grows with depth. Where no page is
    dearer to load than that, the sum falls with every page loaded: all of them is the best choice.
    """
    total = 0.0
    for count, seconds in zip(counts, load, strict=True):
        if count and seconds > first_recompute:
            return None
        total += count * seconds
    found = sum(counts)
    if not found:
        return Gate(0, "miss")
    kept = total + rest_seconds <= slo_seconds
    return Gate(found, "hit") if kept else Gate(0, "slo-lost")
