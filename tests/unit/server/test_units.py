"""Pages of several transfer units, from client to client through every tier and a restart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.results import MISS
from kvtier_agent.cache.units import form_of
from kvtier_agent.native import copier
from kvtier_agent.server import protocol as p
from kvtier_agent.server.client import Client, Stored
from kvtier_agent.server.dispatch import Dispatcher
from raw_peer import Raw

MIB = 1 << 20
GEOMETRY = Geometry(layers=7, kv_heads=1, head_size=12_507, dtype_bytes=1, page_tokens=16)
"""Units of two layers and a last one of one, of a page of 2.7 MiB: none of them aligned."""
FORM = form_of(GEOMETRY)
N = 8
Make = Callable[..., Any]


@pytest.fixture
def cut(pages_of: Make) -> Any:
    assert FORM.units == 4
    return pages_of(3, N, GEOMETRY.page_bytes)


def read_all(client: Client, pages: Any) -> np.ndarray:
    """The tier of each page that came back right; none may come back wrong."""
    out = np.zeros((len(pages), GEOMETRY.page_bytes), np.uint8)
    with client.load(pages.keys, deadline_milliseconds=10_000) as lease:
        good = lease.copy_to(out)
        assert np.array_equal(out[good], pages.bytes[good])
        return np.where(good, lease.tier, np.uint8(MISS))


@pytest.fixture
def agent(make_agent: Make) -> Any:
    slot = GEOMETRY.slot_bytes
    return make_agent(l0=3 * slot, l1=4 * slot, l2=40 * slot)


def at_rest(agent: Any) -> bool:
    traffic = agent.core.cache.traffic
    return bool(agent.call(lambda: not traffic.in_flight and not traffic.moves))


def test_through_every_tier(agent: Any, connect: Make, cut: Any, until: Make) -> None:
    client = connect(agent.socket(), GEOMETRY)
    for i in range(N):
        one = slice(i, i + 1)
        assert client.put(cut.keys[one], cut.bytes[one], depth=16 * i).stored == 1
        assert until(lambda: at_rest(agent))
    tiers = client.lookup(cut.keys).tiers.tolist()
    assert {0, 1, 2} >= set(tiers) >= {2}
    seen: set[int] = set()
    for i in reversed(range(N)):
        assert until(lambda: at_rest(agent))
        one = slice(i, i + 1)
        out = np.zeros((1, GEOMETRY.page_bytes), np.uint8)
        with client.load(cut.keys[one], deadline_milliseconds=10_000) as lease:
            assert lease.copy_to(out).all()
            seen.add(int(lease.tier[0]))
        assert np.array_equal(out[0], cut.bytes[i])
    assert seen == {0, 1, 2}
    counters = agent.call(lambda: agent.core.cache.counters)
    assert counters.demoted_l0
    assert counters.demoted_l1
    assert counters.promoted_l2
    assert not counters.quarantined_pages


def test_over_a_restart_of_the_agent(
    make_agent: Make, connect: Make, cut: Any, until: Make
) -> None:
    """Warm memory, and what lies on the volume."""
    slot = GEOMETRY.slot_bytes
    sizes = {"l0": 0, "l1": 5 * slot, "l2": 40 * slot}
    before = make_agent(**sizes)
    client = connect(before.socket(), GEOMETRY)
    for i in range(N):
        assert client.put(cut.keys[i : i + 1], cut.bytes[i : i + 1]).stored == 1
        assert until(lambda: at_rest(before))
    client.close()
    before.close()
    after = make_agent(**sizes)
    client = connect(after.socket(), GEOMETRY)
    tiers = [int(read_all(client, cut.only(i))[0]) for i in reversed(range(N))]
    assert set(tiers) == {1, 2}, tiers
    assert after.core.cache.counters.taken_over_pages
    assert after.core.cache.counters.found_pages


def test_memory_of_a_version_that_knew_no_units_is_a_cold_start(
    make_agent: Make, connect: Make, cut: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"l0": 0, "l1": 12 * GEOMETRY.slot_bytes, "l2": 0}
    with monkeypatch.context() as old:
        old.setattr(Geometry, "stored_as", Geometry.fingerprint)
        before = make_agent(**sizes)
        client = connect(before.socket(), GEOMETRY)
        assert client.put(cut.keys, cut.bytes).stored == N
        client.close()
        before.close()
    after = make_agent(**sizes)
    cold = after.core.memory.restart.cold
    assert cold == "its pages are of one piece each, this agent's of 4 transfer units"
    client = connect(after.socket(), GEOMETRY)
    assert client.lookup(cut.keys).prefix == 0


def test_an_agent_without_the_native_extension_means_the_same(
    start_agent: Make, connect: Make, cut: Any, until: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_NATIVE", "0")
    slot = GEOMETRY.slot_bytes
    process = start_agent(l0=0, l1=4 * slot, l2=40 * slot)
    client = connect(process.socket(), GEOMETRY)
    for i in range(N):
        one = slice(i, i + 1)
        assert until(lambda one=one: client.put(cut.keys[one], cut.bytes[one]).stored == 1)
    assert until(lambda: client.stats()["tiers"]["nvme"]["pages"] >= 4)
    assert int(read_all(client, cut.only(0))[0]) == 2
    assert process.stop() == 0


def test_a_page_without_units_is_refused_to_an_engine_of_before(agent: Any) -> None:
    raw = Raw(agent.socket())
    try:
        info = p.GeometryInfo.of(GEOMETRY)
        for newest in (1, 2):
            reply = raw.hello(oldest=1, newest=newest, geometry=info)
            assert isinstance(reply, p.Refused)
            assert reply.code == p.Code.PROTOCOL_VERSION
            assert "pages of several transfer units need protocol 3" in reply.message
            assert "update the engine" in reply.message
        small = p.GeometryInfo.of(Geometry.of_page_bytes(16384, 16))
        reply = raw.hello(oldest=1, newest=2, geometry=small)
        assert isinstance(reply, p.Welcome)
        assert reply.protocol == 2
    finally:
        raw.close()


def test_an_agent_of_before_gets_pages_in_one_piece(
    agent: Any, connect: Make, cut: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows one checksum a page, and verifies by it when it moves pages."""
    reply = Dispatcher._reply
    committed: list[np.ndarray] = []
    commit = Dispatcher._commit

    def of_before(self: Dispatcher, identity: bytes, said: p.Reply, *buffers: bytes) -> None:
        if isinstance(said, p.Welcome):
            said = msgspec.structs.replace(said, protocol=p.UNITS_SINCE - 1)
        reply(self, identity, said, *buffers)

    def seen(self: Dispatcher, now: float, session: Any, request: Any, frames: Any) -> None:
        committed.append(np.frombuffer(frames[2], "<u8").copy())
        commit(self, now, session, request, frames)

    monkeypatch.setattr(Dispatcher, "_reply", of_before)
    dispatcher = agent.loop._channels["default"].dispatcher
    dispatcher._handlers[p.Commit] = lambda *said: seen(dispatcher, *said)
    client = connect(agent.socket(), GEOMETRY)
    assert client.put(cut.keys[:2], cut.bytes[:2]).stored == 2
    whole = [copier.checksum(page) for page in cut.bytes[:2]]
    assert committed[0].tolist() == whole
    assert (read_all(client, cut)[:2] != MISS).all()


def test_an_engine_that_fills_the_slots_itself_gives_the_sums_of_units(
    agent: Any, connect: Make, cut: Any
) -> None:
    client = connect(agent.socket(), GEOMETRY)
    reservation = client.reserve(cut.keys[:2])
    assert reservation.offered.tolist() == [0, 1]
    for i in range(2):
        reservation.view(i)[:] = cut.bytes[i]
    starts = np.arange(2, dtype=np.uint64) * np.uint64(GEOMETRY.page_bytes)
    sums = client.form.sums(cut.bytes, starts)
    with pytest.raises(ValueError, match=r"pages have 4 transfer units: .* shape \(2, 4\)"):
        reservation.commit(client.form.checksums(sums))
    assert reservation.commit(sums).tolist() == [Stored.STORED] * 2
    assert (read_all(client, cut)[:2] != MISS).all()


def test_one_page_at_a_time(agent: Any, connect: Make, cut: Any) -> None:
    client = connect(agent.socket(), GEOMETRY)
    put = client.put(cut.keys[:3], lambda i, destination: np.copyto(destination, cut.bytes[i]))
    assert put.stored == 3
    with client.load(cut.keys[:3]) as lease:
        for i in range(3):
            assert np.array_equal(lease.page(i), cut.bytes[i])
            assert lease.verify(i, cut.bytes[i])
        wrong = cut.bytes[1].copy()
        wrong[FORM.start(3)] ^= 1
        assert not lease.verify(1, wrong)
        assert [lease.ok(i) for i in range(3)] == [True, False, True]


@pytest.mark.parametrize("unit", range(4))
def test_a_flipped_bit_in_a_unit_is_a_miss(
    agent: Any, connect: Make, cut: Any, until: Make, unit: int
) -> None:
    client = connect(agent.socket(), GEOMETRY)
    assert client.put(cut.keys[:3], cut.bytes[:3]).stored == 3
    with client.load(cut.keys[:3]) as lease:
        lease.page(1)[FORM.start(unit)] ^= 1
        out = np.zeros((3, GEOMETRY.page_bytes), np.uint8)
        assert lease.copy_to(out).tolist() == [True, False, True]
    assert until(lambda: client.stats()["counters"]["quarantined_pages"] == 1)
    assert client.lookup(cut.keys[:3]).prefix == 1
