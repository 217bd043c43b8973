"""All trust domains' caches as one set of tiers, worked from outside the cache thread.

What a revision gives in bytes is divided evenly between domains. What has to happen on the cache
thread is posted there and waited for; a cache thread that does not answer in time is an error of
the caller's loop, which its supervisor reports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from kvtier_api.node import TierStatus

from kvtier_agent.cache.settings import Behaviour, Budgets
from kvtier_agent.node.budgets import NodeBudgets, NotApplicableError
from kvtier_agent.node.refusals import reason_of
from kvtier_agent.node.revision import part_of, share_of
from kvtier_agent.server.loop import CacheLoop
from kvtier_agent.server.snapshot import ServerSnapshot
from kvtier_agent.storage.core import Core, CoreError

__all__ = ["Rooms", "counters_of", "tiers_of"]

ANSWER_SECONDS: Final = 30.0
"""A reconfiguration shrinks tiers in memory; that takes milliseconds, not this."""


class Rooms:
    """Implements `control.Tiers`."""

    def __init__(
        self,
        loop: CacheLoop,
        cores: Mapping[str, Core],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop = loop
        self._cores = cores
        self._clock = clock
        self._in_force: tuple[Behaviour, Budgets] | None = None

    def prepare(
        self, behaviour: Behaviour, budgets: NodeBudgets, progress: Callable[[], None]
    ) -> None:
        share, part = self._divided(behaviour, budgets)
        for name, core in self._cores.items():
            try:
                core.prepare(part, share, progress)
            except CoreError as e:
                where = f"domain {name}: " if len(self._cores) > 1 else ""
                raise NotApplicableError(reason_of(e), f"{where}{e}") from e

    def reconfigure(self, behaviour: Behaviour, budgets: NodeBudgets) -> None:
        share, part = self._divided(behaviour, budgets)

        def on_cache_thread() -> None:
            now, done = self._clock(), list[Core]()
            try:
                for core in self._cores.values():
                    core.reconfigure(now, part, share)
                    done.append(core)
            except CoreError:
                # All or none: memory that one domain could not have is no reason for two revisions.
                if self._in_force is not None:
                    for core in done:
                        core.reconfigure(now, *self._in_force)
                raise
            self._in_force = (part, share)

        try:
            self._loop.post(on_cache_thread).result(ANSWER_SECONDS)
        except CoreError as e:
            raise NotApplicableError(reason_of(e), str(e)) from e

    def _divided(self, behaviour: Behaviour, budgets: NodeBudgets) -> tuple[Budgets, Behaviour]:
        domains = len(self._cores)
        return share_of(budgets, domains), part_of(behaviour, domains)

    def drop(self) -> None:
        def on_cache_thread() -> None:
            for core in self._cores.values():
                core.drop(self._clock())

        self._loop.post(on_cache_thread).result(ANSWER_SECONDS)


def tiers_of(snapshot: ServerSnapshot | None) -> tuple[TierStatus, ...]:
    """Use of each tier over all domains; tiers that are not configured are left out."""
    if snapshot is None:
        return ()
    sums: dict[str, list[int]] = {}
    for domain in snapshot.domains.values():
        for tier in domain.cache.tiers:
            into = sums.setdefault(tier.name, [0, 0, 0])
            into[0] += tier.capacity_bytes
            into[1] += tier.used_bytes
            into[2] += tier.pages
    return tuple(
        TierStatus(name=name, capacity_bytes=capacity, used_bytes=used, pages=pages)
        for name, (capacity, used, pages) in sums.items()
        if capacity or used or pages
    )


def counters_of(snapshot: ServerSnapshot | None) -> dict[str, int]:
    """This process's counts over all domains, by the names of `kvtier_api.node.Counters`."""
    out: dict[str, int] = {}
    if snapshot is None:
        return out
    for domain in snapshot.domains.values():
        have = domain.counters
        found = {
            **{
                name: have.get(name, 0)
                for name in (
                    *("hits_l0", "hits_l1", "hits_l2", "misses", "hit_tokens", "miss_tokens"),
                    *("quarantined_pages", "failed_moves"),
                )
            },
            "pages_stored": have.get("committed", 0),
            "refused_pages": _sum(
                have, "refused_value", "refused_space", "refused_closed", "refused_quota"
            ),
            "evicted_pages": _sum(have, "evicted_l0", "evicted_l1", "evicted_l2"),
            "demoted_pages": _sum(have, "demoted_l0", "demoted_l1"),
            "promoted_pages": have.get("promoted_l1", 0),
            "nvme_bytes_written": have.get("stored_bytes_l2", 0),
            "nvme_bytes_read": have.get("read_bytes_l2", 0),
        }
        for name, count in found.items():
            out[name] = out.get(name, 0) + count
    return out


def _sum(counters: Mapping[str, int], *names: str) -> int:
    return sum(counters.get(name, 0) for name in names)
