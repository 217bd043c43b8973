"""A revision's sections as the cache wants them: `Behaviour` and `Budgets` of each trust domain.

A revision speaks of the node; what it gives in bytes the domains share evenly, rounded down."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from kvtier_api.policy import RevisionSpec

from kvtier_agent.cache.settings import Behaviour, Budgets, FrozenPrefix, TenantQuota
from kvtier_agent.node.budgets import NodeBudgets

__all__ = ["NOTHING", "behaviour_of", "part_of", "share_of"]

NO_OBJECTIVE_SECONDS: Final = 3600.0
"""Stands for "no objective": no load takes an hour, so only "faster than recompute" decides."""

NOTHING: Final = NodeBudgets(hbm_base=0, l0=0, l1=0)
"""What a node without a policy is given once the grace is over."""


def behaviour_of(spec: RevisionSpec, *, admitting: bool = True) -> Behaviour:
    """The node's. ``admitting`` False: serve what is held and take nothing in."""
    floor = spec.value_density.threshold_microseconds_per_mib
    objective = spec.slo.ttft_p99_milliseconds
    return Behaviour(
        threshold_microseconds_per_mib=(floor.hbm, floor.dram, floor.nvme),
        prior_reuse_percent=spec.value_density.prior_reuse_percent,
        cool_down_seconds=float(spec.replacement.cool_down_seconds),
        tighten_percent=spec.pressure.tighten_percent,
        demote_percent=spec.pressure.demote_percent,
        transfer_bytes=spec.page.transfer_size.bytes,
        slo_seconds=NO_OBJECTIVE_SECONDS if objective is None else objective / 1000.0,
        frozen=tuple(
            FrozenPrefix(f.name, f.max_size.bytes, tuple(map(bytes.fromhex, f.page_keys)))
            for f in spec.frozen_prefixes
        ),
        quotas=tuple(
            TenantQuota(q.tenant, q.hbm_percent, q.dram_percent, q.nvme_percent)
            for q in spec.tenants.quotas
        ),
        durability=spec.durability,
        admitting=admitting,
    )


def part_of(behaviour: Behaviour, domains: int) -> Behaviour:
    """What one trust domain obeys of it: its part of what may stay frozen on the node."""
    frozen = (replace(f, max_bytes=f.max_bytes // domains) for f in behaviour.frozen)
    return replace(behaviour, frozen=tuple(frozen))


def share_of(budgets: NodeBudgets, domains: int) -> Budgets:
    """One trust domain's part of the node's bytes."""
    return Budgets(
        l0_bytes=budgets.l0 // domains,
        l1_bytes=budgets.l1 // domains,
        l2_bytes=budgets.l2 // domains,
        volumes=budgets.volumes,
        reserve_percent=budgets.reserve_percent,
    )
