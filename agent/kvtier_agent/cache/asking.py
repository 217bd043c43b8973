"""What is asked before a load: how long the prefix is that is there, and how much of it to load."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.results import MISS, GateAnswer
from kvtier_agent.cache.worth import Worth
from kvtier_agent.value import gate


def prefix_of(tiers: NDArray[np.uint8]) -> int:
    """How many pages from the first on are there without a gap."""
    missing = tiers == MISS
    first = int(missing.argmax()) if len(tiers) else 0
    return first if len(tiers) and missing[first] else len(tiers)


def pages_to_load(
    worth: Worth, tiers: NDArray[np.uint8], depth: int, total_tokens: int | None, slo: float
) -> GateAnswer:
    """See `Cache.gate`; `slo`: seconds."""
    found = prefix_of(tiers)
    size, page = worth.geometry.page_bytes, worth.geometry.page_tokens
    load = [worth.costs.load_seconds(tier, size) for tier in (0, 1, 2)]
    rest = 0.0
    after = depth + page * found
    if total_tokens is not None and total_tokens > after:
        left = total_tokens - after
        middle = after + left / 2
        rest = left / worth.rate * (1 + middle / worth.settings.parity_tokens)
    counts = np.bincount(tiers[:found], minlength=3).tolist()
    first = worth.recompute_first(depth)
    answer = gate.decide_by_counts(counts, load, first, rest, slo)
    if answer is None:
        recompute = worth.recompute(depth + page * np.arange(found))
        answer = gate.decide(np.array(load)[tiers[:found]], recompute, rest, slo)
    return GateAnswer(answer.load, answer.reason)
