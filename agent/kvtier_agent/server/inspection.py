"""A running agent's page table in figures: what ``kvtier inspect`` shows. Pure, over record copies.

Records come from ``cache.table_reader`` and may be a moment apart from each other; figures are
those of one scan. Ages need the reader's monotonic clock, which on one machine is the agent's.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.record import TIER_OF_STATE, Flag, State, as_bytes_keys

TIERS: Final = ("hbm", "dram", "nvme")
AGE_PERCENTILES: Final = (50, 90, 99, 100)


def summarise(records: NDArray[Any], now: float, top: int = 10) -> dict[str, Any]:
    """The table's figures as plain JSON values.

    ``pages``, ``bytes`` (payload), ``pinned_pages`` (by leases and by clients), ``pins``,
    ``client_pinned_pages``, ``client_pinned_bytes``, ``marked_pages`` (deleted or bad, not free
    yet), ``partial_pages``, ``exempt_pages``; ``states`` and ``tiers`` (pages, bytes,
    pinned_pages, idle_seconds percentiles); ``top_prefixes``: chains by pages, with ``key`` (hex)
    of their first page, ``pages``, ``bytes``, ``hits``, ``longest_tokens`` (in front of the
    deepest), ``idle_seconds``.
    """
    tier = TIER_OF_STATE[records["state"]]
    sizes = records["size"].astype(np.int64)
    pinned = records["pins"] > 0
    idle = np.maximum(0.0, now - records["last_access"])
    flags = records["flags"]
    kept = (flags & Flag.PINNED) != 0
    return {
        "pages": len(records),
        "bytes": int(sizes.sum()),
        "pinned_pages": int(pinned.sum()),
        "pins": int(records["pins"].sum()),
        "client_pinned_pages": int(kept.sum()),
        "client_pinned_bytes": int(sizes[kept].sum()),
        "marked_pages": int(((flags & Flag.DOOMED) != 0).sum()),
        "partial_pages": int(((flags & Flag.PARTIAL) != 0).sum()),
        "exempt_pages": int(((flags & Flag.EXEMPT) != 0).sum()),
        "states": {
            state.name: int((records["state"] == state).sum())
            for state in State
            if state is not State.FREE
        },
        "tiers": {
            name: {
                "pages": int((tier == number).sum()),
                "bytes": int(sizes[tier == number].sum()),
                "pinned_pages": int((pinned & (tier == number)).sum()),
                "idle_seconds": _percentiles(idle[tier == number]),
            }
            for number, name in enumerate(TIERS)
        },
        "top_prefixes": _prefixes(records, sizes, idle, top),
    }


def _percentiles(values: NDArray[np.float64]) -> dict[str, float] | None:
    if not values.size:
        return None
    found = np.percentile(values, AGE_PERCENTILES)
    names = ("p50", "p90", "p99", "max")
    return {name: round(float(value), 3) for name, value in zip(names, found, strict=True)}


def roots(records: NDArray[Any]) -> NDArray[np.intp]:
    """For each record the index of the first page of its chain that is in the table."""
    n = len(records)
    own = np.ascontiguousarray(records["key"]).view("V16").reshape(n)
    order = np.argsort(own)
    parents = np.ascontiguousarray(records["parent"]).view("V16").reshape(n)
    place = np.minimum(np.searchsorted(own, parents, sorter=order), max(0, n - 1))
    candidate = order[place] if n else order
    up = np.where(own[candidate] == parents, candidate, np.arange(n))
    # Pointer jumping: after k rounds every record points 2^k pages up, or at its root.
    for _ in range(32):
        further = up[up]
        if np.array_equal(further, up):
            break
        up = further
    return up


def _prefixes(
    records: NDArray[Any], sizes: NDArray[np.int64], idle: NDArray[np.float64], top: int
) -> list[dict[str, Any]]:
    if not len(records):
        return []
    root = roots(records)
    n = len(records)
    pages = np.bincount(root, minlength=n)
    size = np.bincount(root, weights=sizes, minlength=n)
    hits = np.bincount(root, weights=records["hits"], minlength=n)
    longest = np.zeros(n, np.int64)
    np.maximum.at(longest, root, records["depth"].astype(np.int64))
    fresh = np.full(n, np.inf)
    np.minimum.at(fresh, root, idle)
    keys = as_bytes_keys(records["key"])
    return [
        {
            "key": keys[i].tobytes().hex(),
            "pages": int(pages[i]),
            "bytes": int(size[i]),
            "hits": int(hits[i]),
            "longest_tokens": int(longest[i]),
            "idle_seconds": round(float(fresh[i]), 3),
        }
        for i in np.argsort(-pages, kind="stable")[:top]
        if pages[i]
    ]
