"""A policy's nodes, counted from what their agents reported.

A node that has not reported for three intervals is *stale*: what it last said counts for nothing,
so that a silent node is never a success. Such a node is neither ready nor updated. Nor is one whose
KVTierNode still asks for another revision (it is about to leave the one that it reports), or is
being deleted (it is about a Node that was).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier_api.policy import NodeCounts

from kvtier_operator.decide.facts import CacheNode
from kvtier_operator.decide.gather import RuledNode

__all__ = ["Tally", "intervals_until_stale", "stale_after", "tally"]

intervals_until_stale = 3


@dataclass(frozen=True, slots=True)
class Tally:
    """Names are sorted; ``troubled`` maps a node to its agent's reason and message."""

    selected: int
    updated: int
    ready: int
    stale: tuple[str, ...]
    not_ready: tuple[tuple[str, str], ...]
    cannot_apply: tuple[tuple[str, str], ...]
    not_applied: tuple[str, ...]
    """Field paths that at least one updated node cannot obey."""
    without: int
    """Nodes whose KVTierNode does not ask for the desired revision."""
    held_back: bool
    """Whether one of them asks for another."""
    next_stale_after: float | None
    """Seconds of seen time until the next node turns stale."""

    @property
    def counts(self) -> NodeCounts:
        """As in status."""
        return NodeCounts(
            selected=self.selected,
            ready=self.ready,
            updated=self.updated,
            stale=len(self.stale),
        )


def stale_after(cache: CacheNode) -> float:
    """Seconds of silence after which a node is stale."""
    return float(intervals_until_stale * max(1, cache.report_interval))


def tally(ruled: tuple[RuledNode, ...], desired: str) -> Tally:
    """Count ``ruled`` against the revision ``desired`` ("" where there is none)."""
    updated = ready = 0
    stale: list[str] = []
    not_ready: list[tuple[str, str]] = []
    cannot: list[tuple[str, str]] = []
    not_applied: set[str] = set()
    next_stale: float | None = None
    told = ["" if n.cache is None else n.cache.stable_revision for n in ruled]
    for node in ruled:
        cache = node.cache
        if cache is None or cache.deleting or node.silent is None:
            continue
        left = stale_after(cache) - node.silent
        if left <= 0:
            stale.append(node.name)
            continue
        next_stale = left if next_stale is None else min(next_stale, left)
        report = cache.report
        current = report.observed_generation == cache.generation
        if report.stalled is not None and report.stalled.status == "True" and current:
            cannot.append((node.name, f"{report.stalled.reason}: {report.stalled.message}"))
        is_updated = bool(desired) and report.revision == desired == cache.stable_revision
        if is_updated:
            updated += 1
            not_applied.update(report.not_applied)
        if report.ready is not None and report.ready.status == "True":
            ready += 1
        elif is_updated:
            why = report.ready
            not_ready.append(
                (node.name, f"{why.reason}: {why.message}" if why else "no condition Ready")
            )
    return Tally(
        selected=len(ruled),
        updated=updated,
        ready=ready,
        stale=tuple(stale),
        not_ready=tuple(not_ready),
        cannot_apply=tuple(cannot),
        not_applied=tuple(sorted(not_applied)),
        without=sum(revision != desired for revision in told),
        held_back=any(revision not in ("", desired) for revision in told),
        next_stale_after=next_stale,
    )
