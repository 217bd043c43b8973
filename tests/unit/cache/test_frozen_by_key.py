"""Pages that a policy lists by key are frozen, whether or not a request names their prefix."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.identity import KeyArray
from kvtier_agent.cache.results import PutStatus
from kvtier_agent.cache.settings import Behaviour, Budgets, CacheSettings, FrozenPrefix
from kvtier_agent.storage.core import Core, CoreSettings

PAGE = 4096
HIGH = (10**9, 10**9, 10**9)
"""Thresholds that no ordinary page passes."""


def keys(first: int, count: int) -> KeyArray:
    raw = b"".join(n.to_bytes(16, "big") for n in range(first, first + count))
    return np.frombuffer(raw, dtype=np.uint8).reshape(-1, 16)


def listed(name: str, pages: int, which: KeyArray) -> FrozenPrefix:
    return FrozenPrefix(name, pages * PAGE, tuple(key.tobytes() for key in which))


@pytest.fixture
def core(tmp_path: Path) -> Iterator[Core]:
    core = Core(
        CoreSettings(
            domain="d",
            arena_folder=tmp_path,
            table_path=tmp_path / "d.table",
            volumes={},
            maximum_l0_bytes=64 * PAGE,
            maximum_l1_bytes=64 * PAGE,
            synchronous=True,
            cache=CacheSettings(max_pages=1024),
        )
    )
    core.register(0.0, Geometry.of_page_bytes(PAGE, 16))
    yield core
    core.close()


def policy(core: Core, *frozen: FrozenPrefix, floor: tuple[int, int, int] = (0, 0, 0)) -> None:
    behaviour = Behaviour(threshold_microseconds_per_mib=floor, frozen=frozen)
    core.reconfigure(1.0, behaviour, Budgets(16 * PAGE, 32 * PAGE))


def put(core: Core, which: KeyArray, frozen: str | None = None) -> list[PutStatus]:
    result = core.cache.reserve(2.0, 1, which, frozen=frozen)
    taken = which[result.status == PutStatus.OFFERED]
    core.cache.commit(2.0, 1, taken, np.zeros(len(taken), dtype=np.uint64))
    return [PutStatus(status) for status in result.status]


def exempt(core: Core) -> dict[str, int]:
    return {f.name: f.exempt_pages for f in core.cache.snapshot(2.0).frozen}


def test_listed_pages_are_admitted_whatever_their_value(core: Core) -> None:
    policy(core, listed("bot", 8, keys(0, 4)), floor=HIGH)
    assert put(core, keys(0, 6)) == [PutStatus.OFFERED] * 4 + [PutStatus.REFUSED_VALUE] * 2
    assert exempt(core) == {"bot": 4}


def test_the_budget_holds_for_listed_pages_too(core: Core) -> None:
    policy(core, listed("bot", 3, keys(0, 4)), floor=HIGH)
    assert put(core, keys(0, 4)) == [PutStatus.OFFERED] * 3 + [PutStatus.REFUSED_VALUE]
    assert exempt(core) == {"bot": 3}


def test_one_request_may_touch_two_prefixes_and_pages_of_none(core: Core) -> None:
    policy(core, listed("a", 8, keys(0, 2)), listed("b", 8, keys(3, 2)))
    assert put(core, keys(0, 6)) == [PutStatus.OFFERED] * 6
    assert exempt(core) == {"a": 2, "b": 2}


def test_the_name_in_a_request_goes_before_the_list(core: Core) -> None:
    policy(core, listed("a", 8, keys(0, 2)), FrozenPrefix("b", 8 * PAGE))
    put(core, keys(0, 2), frozen="b")
    assert exempt(core) == {"a": 0, "b": 2}


def test_pages_held_before_they_were_listed_join_and_leave_with_the_policy(core: Core) -> None:
    policy(core)
    put(core, keys(0, 4))
    policy(core, listed("bot", 8, keys(1, 2)))
    assert exempt(core) == {"bot": 2}
    policy(core)
    assert sum(exempt(core).values()) == 0


def test_a_listed_page_that_is_loaded_stays_frozen_once(core: Core) -> None:
    policy(core, listed("bot", 8, keys(0, 2)))
    put(core, keys(0, 3))
    ticket = core.cache.load(3.0, 1, keys(0, 3), 10.0)
    core.cache.release(3.0, 1, ticket.lease)
    assert exempt(core) == {"bot": 2}


def test_frozen_pages_stay_while_others_come_and_go(core: Core) -> None:
    policy(core, listed("bot", 8, keys(0, 4)))
    put(core, keys(0, 4))
    for first in range(100, 400, 10):
        put(core, keys(first, 10))
        core.pump()
        core.collect(3.0)
    assert (core.cache.lookup(keys(0, 4)).tiers == 0).all()
