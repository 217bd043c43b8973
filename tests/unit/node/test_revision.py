"""Every revision that the API takes is one that the cache takes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kvtier_agent.cache.settings import Behaviour, TenantQuota
from kvtier_agent.node.budgets import NodeBudgets
from kvtier_agent.node.main import Agent
from kvtier_agent.node.revision import NO_OBJECTIVE_SECONDS, NOTHING, behaviour_of, share_of
from kvtier_agent.node.rooms import Rooms
from kvtier_agent.settings import AgentSettings, Domain
from kvtier_api.sections import Pressure, Replacement, ValueDensity

Make = Callable[..., Any]


def bounds(model: Any, name: str) -> tuple[int, int]:
    low = high = 0
    for bound in model.model_fields[name].metadata:
        low = getattr(bound, "ge", low)
        high = getattr(bound, "le", high)
    assert high > low
    return low, high


def test_defaults_are_the_apis(revision: Make) -> None:
    made = behaviour_of(revision())
    assert made == Behaviour(slo_seconds=NO_OBJECTIVE_SECONDS)


def test_every_section_arrives(revision: Make) -> None:
    made = behaviour_of(
        revision(
            valueDensity={
                "model": "classic",
                "priorReusePercent": 44,
                "thresholdMicrosecondsPerMiB": {"hbm": 3, "dram": 2, "nvme": 1},
            },
            tiers={"nvme": {"size": "1Gi", "volumes": ["data0"]}},
            page={"transferSize": "512Ki"},
            replacement={"coolDownSeconds": 7},
            pressure={"tightenPercent": 80, "demotePercent": 85},
            frozenPrefixes=[{"name": "bot", "maxSize": "1Gi", "pageKeys": ["00" * 15 + "ff"]}],
            slo={"ttftP99Milliseconds": 750},
            tenants={"quotas": [{"tenant": "search", "hbmPercent": 0, "nvmePercent": 40}]},
            durability="sync",
        ),
        admitting=False,
    )
    assert made.threshold_microseconds_per_mib == (3, 2, 1)
    assert (made.prior_reuse_percent, made.cool_down_seconds) == (44, 7.0)
    assert (made.tighten_percent, made.demote_percent) == (80, 85)
    assert (made.transfer_bytes, made.slo_seconds) == (512 << 10, 0.75)
    assert made.durability == "sync"
    assert made.quotas == (TenantQuota("search", 0, None, 40),)
    assert not made.admitting
    (prefix,) = made.frozen
    assert (prefix.name, prefix.max_bytes) == ("bot", 1 << 30)
    assert prefix.page_keys == (bytes(15) + b"\xff",)


@pytest.mark.parametrize("end", [0, 1], ids=["least", "most"])
def test_the_ends_of_every_range_are_taken(revision: Make, end: int) -> None:
    demote = bounds(Pressure, "demote_percent")[end]
    tighten = min(bounds(Pressure, "tighten_percent")[end], demote - 1)
    made = behaviour_of(
        revision(
            valueDensity={
                "model": "classic",
                "priorReusePercent": bounds(ValueDensity, "prior_reuse_percent")[end],
            },
            page={"transferSize": ("256Ki", "1Mi")[end]},
            replacement={"coolDownSeconds": bounds(Replacement, "cool_down_seconds")[end]},
            pressure={"tightenPercent": tighten, "demotePercent": demote},
            slo={"ttftP99Milliseconds": (1, 600_000)[end]},
        )
    )
    assert made.demote_percent == demote


def test_domains_share_evenly_and_never_more_than_there_is() -> None:
    whole = NodeBudgets(hbm_base=100, l0=100, l1=1001, l2=5, volumes=("a",), reserve_percent=7)
    part = share_of(whole, 3)
    assert (part.l0_bytes, part.l1_bytes, part.l2_bytes) == (33, 333, 1)
    assert (part.volumes, part.reserve_percent) == (("a",), 7)


class Core:
    """Stands for a trust domain's: keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[Behaviour] = []

    def prepare(self, behaviour: Behaviour, *_: Any) -> None:
        self.told.append(behaviour)

    def reconfigure(self, now: float, behaviour: Behaviour, budgets: Any) -> None:
        self.told.append(behaviour)


class Loop:
    """Stands for the cache thread."""

    def post(self, call: Callable[[], None]) -> Future[None]:
        done = Future[None]()
        call()
        done.set_result(None)
        return done


def test_what_may_stay_frozen_on_a_node_is_shared_by_its_domains(revision: Make) -> None:
    cores: Any = {"a": Core(), "b": Core(), "c": Core()}
    loop: Any = Loop()
    rooms = Rooms(loop, cores)
    behaviour = behaviour_of(
        revision(
            frozenPrefixes=[
                {"name": "bot", "maxSize": "1Gi"},
                {"name": "other", "maxSize": "2Gi", "pageKeys": ["00" * 16]},
            ]
        )
    )
    rooms.prepare(behaviour, NOTHING, lambda: None)
    rooms.reconfigure(behaviour, NOTHING)
    for times in range(2):
        for i, most in enumerate((1 << 30, 2 << 30)):
            given = [core.told[times].frozen[i].max_bytes for core in cores.values()]
            assert most - 3 < sum(given) <= most
    one = cores["a"].told[0]
    assert one.frozen[1].page_keys == behaviour.frozen[1].page_keys
    assert replace(one, frozen=behaviour.frozen) == behaviour, "all else is each domain's own"


@pytest.mark.parametrize("rate", [0, 1, 100 << 20])
def test_what_a_drive_may_be_given_is_shared_by_the_domains(tmp_path: Path, rate: int) -> None:
    def compaction(*domains: str) -> int:
        made = AgentSettings(
            node_name="n", domain=tuple(map(Domain, domains)), compaction_rate=rate,
            run_dir=tmp_path, state_dir=tmp_path,
        )  # fmt: skip
        return Agent(made)._cache_settings().compaction_bytes_per_second

    assert compaction("one") == rate
    assert compaction("one", "two") == (rate // 2 or rate), "0 means that nothing is moved"
