"""Tenants and their quotas, as rules for the state machine of the cache.

A part of `machine.CacheMachine`. Client n is of tenant n, client 3 of none.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from kvtier_agent.cache.quotas import UNBOUNDED, tenant_number
from kvtier_agent.cache.record import NO_SLOT, Flag
from kvtier_agent.cache.settings import Behaviour, TenantQuota
from kvtier_agent.storage.core import CoreError

PERCENTS = st.sampled_from([None, None, 10, 50, 0])


class TenantRules:
    """Mixed into a `RuleBasedStateMachine`."""

    cache: Any
    core: Any
    io: Any
    now: float
    behaviour: Behaviour
    last_budgets: Any

    def turn(self) -> None:
        raise NotImplementedError

    @staticmethod
    def tenant_of(client: int) -> int:
        return tenant_number("" if client == 3 else f"tenant-{client}")

    @rule(hbm=PERCENTS, dram=PERCENTS, nvme=PERCENTS, both=st.booleans())
    def new_quotas(self, hbm: int | None, dram: int | None, nvme: int | None, both: bool) -> None:
        quotas = [TenantQuota("tenant-1", hbm, dram, nvme)]
        if both:
            quotas.append(TenantQuota("tenant-2", nvme, hbm, dram))
        behaviour = replace(self.behaviour, quotas=tuple(quotas))
        try:
            self.core.reconfigure(self.now, behaviour, self.last_budgets)
        except CoreError:
            assert self.io.write_faults or self.io.read_faults
        else:
            self.behaviour = behaviour
        self.turn()

    @invariant()
    def quotas_are_kept(self) -> None:
        """What a tenant uses beyond a quota never grows: it was there when the quota came, or is
        (or was until now) exempt as part of a frozen prefix."""
        cache = self.cache
        table, quotas = cache.table, cache.shelves.quotas
        rows = table.live_rows()
        exempt = table.has(rows, Flag.EXEMPT)
        seen: dict[tuple[int, int], int] = self.__dict__.setdefault("_over", {})
        rules = (cache, self.behaviour, self.last_budgets)
        if self.__dict__.get("_over_by") != rules:
            seen.clear()
            self.__dict__["_over_by"] = rules
        keys = [key.tobytes() for key in table.key[rows]]
        before: set[bytes] = self.__dict__.get("_exempt", set())
        self.__dict__["_exempt"] = {k for k, is_so in zip(keys, exempt, strict=True) if is_so}
        no_more = ~exempt & np.array([key in before for key in keys], dtype=bool)
        for number, share in quotas.shares.items():
            mine = exempt & (table.tenant[rows] == number)
            ended = no_more & (table.tenant[rows] == number)
            for tier, limit in enumerate(share.limits):
                if limit == UNBOUNDED:
                    continue
                held = cache.shelves.slots[tier]
                used = int(quotas.use[tier][number]) - int((held[rows[mine]] != NO_SLOT).sum())
                on_top = int((held[rows[ended]] != NO_SLOT).sum())
                most = max(limit, seen.get((number, tier), used) + on_top)
                assert used <= most, f"{share.name} has {used} of {limit} slots of tier {tier}"
                seen[number, tier] = max(used, limit)

    def change_quotas(self, rng: random.Random) -> None:
        """At random, for long runs."""
        percents = [None, None, 10, 50, 0]
        self.new_quotas(
            rng.choice(percents), rng.choice(percents), rng.choice(percents), rng.random() < 0.5
        )
