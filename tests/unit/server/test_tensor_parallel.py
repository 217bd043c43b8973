"""A page of a tensor-parallel group counts when every rank's part is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_agent.cache import identity
from kvtier_agent.cache.cache import Cache
from kvtier_agent.cache.geometry import Geometry, GeometryError
from kvtier_agent.cache.page_table import PageTable
from kvtier_agent.cache.parts import all_parts, part_key, part_keys, whole_deleted, whole_pages
from kvtier_agent.cache.results import MISS, DeleteStatus, PutStatus
from kvtier_agent.cache.settings import Behaviour, Budgets, FrozenPrefix
from kvtier_agent.server import protocol as p
from kvtier_agent.server.client import Client, Deleted, Pinned
from kvtier_agent.server.dispatch import Dispatcher
from raw_peer import Raw

Make = Callable[..., Any]
TP = 4
GEOMETRY = Geometry(
    layers=4, kv_heads=8, head_size=64, dtype_bytes=2, page_tokens=16, tp=TP, weights="w"
)


def ranks(agent: Any, connect: Make, **settings: Any) -> list[Client]:
    return [connect(agent.socket(), GEOMETRY, rank=rank, **settings) for rank in range(TP)]


def test_one_rank_alone_has_no_page(agent: Any, connect: Make, pages_of: Make) -> None:
    group = ranks(agent, connect)
    keys = pages_of(1, 6).keys
    bodies = [pages_of(10 + rank, 6, GEOMETRY.page_bytes).bytes for rank in range(TP)]
    for rank in range(TP - 1):
        assert group[rank].put(keys, bodies[rank]).stored == 6  # its own part, not another's
    assert all(client.lookup(keys).prefix == 0 for client in group)
    assert group[TP - 1].put(keys[:4], bodies[TP - 1][:4]).stored == 4
    for rank, client in enumerate(group):
        found = client.lookup(keys)
        assert found.prefix == 4
        assert (found.tiers[4:] == MISS).all()
        out = np.zeros((4, GEOMETRY.page_bytes), np.uint8)
        with client.load(keys[:4]) as lease:
            assert lease.copy_to(out).all()
        assert np.array_equal(out, bodies[rank][:4])


def test_a_part_that_goes_takes_the_page_along(agent: Any, connect: Make, pages_of: Make) -> None:
    group = ranks(agent, connect)
    keys = pages_of(1, 4).keys
    for client in group:
        client.put(keys, pages_of(2, 4, GEOMETRY.page_bytes).bytes)
    assert group[0].lookup(keys).prefix == 4
    lost = part_keys(keys[2:3], 1, TP)
    agent.call(lambda: agent.core.cache.delete(agent.core.cache._now, lost))
    assert [client.lookup(keys).prefix for client in group] == [2] * TP


def test_deleting_a_page_deletes_every_part(agent: Any, connect: Make, pages_of: Make) -> None:
    group = ranks(agent, connect)
    keys = pages_of(1, 3).keys
    for client in group:
        client.put(keys, pages_of(2, 3, GEOMETRY.page_bytes).bytes)
    assert (group[1].pin(keys[:1]) == Pinned.PINNED).all()
    status = group[3].delete(keys)
    assert status.tolist() == [Deleted.MARKED, Deleted.DELETED, Deleted.DELETED]
    left = agent.call(lambda: agent.core.cache.table.pages)
    assert left == 1  # the pinned part
    group[1].unpin(keys[:1])
    group[1].ping()
    assert agent.call(lambda: agent.core.cache.table.pages) == 0


def test_a_page_of_a_group_is_one_page_asked_for(agent: Any, connect: Make, pages_of: Make) -> None:
    group = ranks(agent, connect)
    keys = pages_of(1, 5).keys
    for client in group:
        client.put(keys, pages_of(2, 5, GEOMETRY.page_bytes).bytes)
    group[0].lookup(keys, request=77)
    for client in group:
        with client.load(keys, request=77) as lease:
            assert lease.prefix == 5
    counters = group[0].stats()["counters"]
    assert counters["asked_pages"] == 5
    assert sum(counters[f"hits_l{layer}"] for layer in range(3)) == 5
    assert counters["misses"] == 0


def test_the_agent_is_ready_though_its_probe_is_one_alone(
    agent: Any, connect: Make, get: Make, until: Callable[..., bool]
) -> None:
    ranks(agent, connect)
    port = agent.http.address[1]
    assert until(lambda: "stored, loaded and verified" in get(port, "/readyz")[1])
    assert get(port, "/readyz")[0] == 200


def test_a_rank_that_cannot_be_is_refused(agent: Any, connect: Make) -> None:
    with pytest.raises(ValueError, match="rank is 4; give a whole number from 0 to 3"):
        Client(agent.socket(), GEOMETRY, rank=4)
    with pytest.raises(GeometryError, match="write a number of ranks from 1 to 1024"):
        Geometry(layers=2048, kv_heads=1, head_size=1, dtype_bytes=1, page_tokens=1, tp=2048)


def test_a_client_that_cannot_tell_its_rank_is_refused(agent: Any) -> None:
    """As the release before wrote it: its version, and no rank. All of its ranks would be rank 0,
    and read each other's bytes with checksums that match."""
    raw = Raw(agent.socket())
    try:
        geometry = msgspec.to_builtins(p.GeometryInfo.of(GEOMETRY))
        old = ["hi", 1, 1, 1, p.ARENA_LAYOUT, 1, geometry, "old", 7, False, 0]
        reply = raw.ask(msgspec.msgpack.encode(old))
        assert isinstance(reply, p.Refused)
        assert reply.code == p.Code.PROTOCOL_VERSION
        assert "update the engine" in reply.message
    finally:
        raw.close()


def test_an_agent_that_knows_no_ranks_is_not_used_by_a_group(
    agent: Any, connect: Make, pages_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An agent of the release before skips the rank, and speaks its own version.
    hello, reply = Dispatcher._hello, Dispatcher._reply

    def without_rank(self: Dispatcher, now: float, identity: bytes, said: p.Hello) -> None:
        hello(self, now, identity, msgspec.structs.replace(said, rank=0))

    def of_before(self: Dispatcher, identity: bytes, said: p.Reply, *buffers: bytes) -> None:
        if isinstance(said, p.Welcome):
            said = msgspec.structs.replace(said, protocol=p.RANKS_SINCE - 1)
        reply(self, identity, said, *buffers)

    monkeypatch.setattr(Dispatcher, "_hello", without_rank)
    monkeypatch.setattr(Dispatcher, "_reply", of_before)
    a, b = (connect(agent.socket(), GEOMETRY, rank=rank, timeout_seconds=2.0) for rank in (0, 1))
    pages = pages_of(1, 3, GEOMETRY.page_bytes)
    assert a.put(pages.keys, pages.bytes).stored == 0
    with b.load(pages.keys) as lease:
        assert not lease.copy_to(np.zeros_like(pages.bytes)).any()
    assert b.counters.by_code[p.Code.PROTOCOL_VERSION] >= 1
    assert "update the agent" in b.counters.last_error


@given(
    there=st.lists(st.lists(st.sampled_from([0, 1, 2, MISS]), min_size=9, max_size=9),
                   min_size=1, max_size=5),
)  # fmt: skip
def test_a_page_is_as_far_away_as_its_farthest_part(there: list[list[int]]) -> None:
    tp, keys = len(there), np.arange(9 * 16, dtype=np.uint8).reshape(9, 16)
    tiers = {
        part_keys(keys[i : i + 1], rank, tp).tobytes(): there[rank][i]
        for rank in range(tp)
        for i in range(9)
    }
    assert len(tiers) == tp * 9  # no part has another's key
    found = whole_pages(
        lambda parts: np.array([tiers[part.tobytes()] for part in parts], np.uint8), keys, tp
    )
    assert found.tolist() == [max(column) for column in zip(*there, strict=True)]


@given(
    status=st.lists(st.lists(st.sampled_from(list(DeleteStatus)), min_size=4, max_size=4),
                    min_size=1, max_size=4),
)  # fmt: skip
def test_a_deletion_says_the_most_that_holds_of_any_part(status: list[list[int]]) -> None:
    found = whole_deleted(np.array(status, np.uint8).reshape(-1), len(status)).tolist()
    for page, parts in enumerate(zip(*status, strict=True)):
        held = DeleteStatus.MARKED in parts
        there = DeleteStatus.DELETED in parts
        assert found[page] == (
            DeleteStatus.MARKED if held else DeleteStatus.DELETED if there else DeleteStatus.ABSENT
        )


def test_with_one_rank_the_part_is_the_page() -> None:
    keys = np.arange(32, dtype=np.uint8).reshape(2, 16)
    assert part_keys(keys, 0, 1) is keys
    assert identity.rank_mask(0, 1) == bytes(16)
    assert all_parts(keys, 2).tolist() == [
        *part_keys(keys, 0, 2).tolist(), *part_keys(keys, 1, 2).tolist(),
    ]  # fmt: skip
    assert len({identity.rank_mask(rank, tp) for tp in (2, 4, 8) for rank in range(tp)}) == 14


def test_pages_that_a_policy_freezes_by_key_are_frozen_on_every_rank() -> None:
    keys = np.random.default_rng(1).integers(0, 256, (3, 16), dtype=np.uint8)
    size = GEOMETRY.slot_bytes
    cache = Cache(PageTable(None, max_pages=1024), GEOMETRY)
    listed = FrozenPrefix("system", 100 * size, (keys[1].tobytes(),))
    cache.reconfigure(0.0, Behaviour(frozen=(listed,)), Budgets(20 * size, 20 * size))
    for rank in range(TP):
        mine = part_keys(keys, rank, TP)
        parent = part_key(bytes(range(16)), rank, TP)
        assert (cache.reserve(1.0, 1, mine, parent=parent).status == PutStatus.OFFERED).all()
    (prefix,) = cache.snapshot(1.0).frozen
    assert prefix.exempt_pages == TP
