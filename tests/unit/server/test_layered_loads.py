"""Leases that are read while their pages land, unit by unit: what comes first, and what never."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from gates import GatedIO
from kvtier_agent.cache import geometry as geometries
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.results import MISS
from kvtier_agent.cache.snapshot import check_books
from kvtier_agent.cache.units import form_of
from kvtier_agent.server import protocol as p
from kvtier_agent.server.client import Client, LayeredLease
from kvtier_agent.server.dispatch import Dispatcher
from kvtier_agent.storage.segment import HEADER, HEADER_BYTES
from ring_faults import why_no_ring

Make = Callable[..., Any]
GEOMETRY = Geometry(layers=7, kv_heads=1, head_size=160, dtype_bytes=1, page_tokens=16)
"""Layers of 5,120 bytes: where a unit is at most 12,000, four units, the last one of one layer."""
PAGE = GEOMETRY.page_bytes
SLOT = 36864 + 4096
N = 5
"""Pages that are asked for; they lie on NVMe."""
WAYS = [
    pytest.param(
        True, id="rings", marks=pytest.mark.skipif(bool(why_no_ring()), reason=why_no_ring())
    ),
    pytest.param(False, id="calls"),
]


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a unit were at most so many bytes, in agent and client."""
    monkeypatch.setattr(geometries, "UNIT_BYTES", 12_000)


class Stand:
    """An agent with a gate before its drive; the first pages of `pages` are on NVMe alone."""

    def __init__(self, agent: Any, gate: GatedIO, client: Client, pages: Any) -> None:
        self.agent, self.gate, self.client, self.pages = agent, gate, client, pages
        self.keys, self.bytes = pages.keys[:N], pages.bytes[:N]

    @property
    def cache(self) -> Any:
        return self.agent.core.cache

    def load(self, deadline: int = 20_000, **settings: Any) -> LayeredLease:
        return self.client.load(self.keys, layered=True, deadline_milliseconds=deadline, **settings)

    def goes_down(self) -> None:
        """The pages leave memory."""
        self.cache.traffic.go_down(time.monotonic(), self.cache.table.lookup(self.keys))
        self.agent.core.pump()

    def at_rest(self) -> bool:
        """Nothing moves, nothing is held, and the books are right."""

        def look() -> bool:
            cache = self.cache
            idle = not cache.traffic.in_flight and not cache.traffic.moves
            held = cache.book.leases or cache.table.pins.any()
            layered = self.agent.loop._channels["default"].dispatcher.layered
            if not idle or held or layered.waiting or layered._open or cache.book._deadlines:
                cache.book.next_due()
                return False
            check_books(cache)
            assert not cache.traffic.progress._moves
            assert not cache.traffic.progress._landed
            return True

        return bool(self.agent.call(look))

    def counters(self) -> Any:
        return self.cache.counters


@pytest.fixture(params=WAYS)
def stand(
    request: pytest.FixtureRequest, make_agent: Make, connect: Make, pages_of: Make, until: Make
) -> Iterator[Stand]:
    assert (GEOMETRY.units, GEOMETRY.slot_bytes) == (4, SLOT)
    gate = GatedIO(rings=request.param)
    agent = make_agent(
        l0=0, l1=24 * SLOT, l2=100 * SLOT, io=gate, cache={"max_pages": 1024, "move_bytes": PAGE}
    )
    client, pages = connect(agent.socket(), GEOMETRY), pages_of(7, N + 3, PAGE)
    one = Stand(agent, gate, client, pages)
    assert client.put(pages.keys, pages.bytes).stored == N + 3
    assert until(one.at_rest)
    agent.call(one.goes_down)
    assert until(one.at_rest)
    assert client.lookup(pages.keys).tiers.tolist() == [2] * N + [1] * 3
    gate.shut = True
    yield one
    gate.open_up()


def test_the_first_units_of_all_pages_come_before_the_last_of_any(
    stand: Stand, until: Make
) -> None:
    gate = stand.gate
    began = time.monotonic()
    with stand.load() as lease:
        assert time.monotonic() - began < 5
        assert (lease.units, lease.tier.tolist()) == (4, [2] * N)
        for unit in range(4):
            gate.let(N)
            assert lease.wait_units(unit + 1).all()
            if unit < 3:
                assert stand.cache.table.pins.any()
                assert (lease._landed == unit + 1).all()
                assert stand.client.lookup(stand.keys).tiers.tolist() == [2] * N
            start, end = lease.unit_span(unit, unit + 1)
            out = np.zeros((N, end - start), np.uint8)
            assert lease.copy_units(unit, unit + 1, out).all()
            assert np.array_equal(out, stand.bytes[:, start:end])
    gate.open_up()
    assert until(stand.at_rest)
    assert stand.counters().early_units == 3 * N
    assert stand.counters().quarantined_pages == 0
    assert stand.client.lookup(stand.keys).tiers.tolist() == [1] * N


def test_units_go_to_rows_and_to_their_places_in_pages(stand: Stand) -> None:
    stand.gate.open_up()
    out = np.zeros((N + 2, PAGE), np.uint8)
    rows = np.array([6, 0, 3, 2, 1])
    with stand.load() as lease:
        assert lease.copy_units(1, 3, out, rows).all()
        start, end = lease.unit_span(1, 3)
        assert np.array_equal(out[rows, start:end], stand.bytes[:, start:end])
        assert not out[:, :start].any()
        assert not out[:, end:].any()
        assert lease.copy_units(0, 0, out).all()
        assert lease.copy_to(out[:N]).all()
        assert np.array_equal(out[:N], stand.bytes)
        assert np.array_equal(lease.page(2), stand.bytes[2])
        for wrong in ((-1, 1), (2, 1), (0, 5)):
            with pytest.raises(ValueError, match="of pages that have 4"):
                lease.copy_units(*wrong, out)
        with pytest.raises(ValueError, match="5 units of pages that have 4"):
            lease.wait_units(5)
        with pytest.raises(ValueError, match=r"write \(n, 10240\) uint8 instead"):
            lease.copy_units(0, 1, np.zeros((N, 7), np.uint8))


def test_pages_in_memory_have_landed(stand: Stand) -> None:
    stand.gate.open_up()
    keys, pages = stand.pages.keys[-3:], stand.pages.bytes[-3:]
    with stand.client.load(keys, layered=True) as lease:
        assert lease.tier.tolist() == [1] * 3
        assert (lease._landed == 4).all()
        out = np.zeros((3, PAGE), np.uint8)
        for unit in range(4):
            assert lease.copy_units(unit, unit + 1, out).all()
        assert np.array_equal(out, pages)
    assert stand.counters().early_units == 0


def test_what_does_not_land_by_the_deadline_is_a_miss(stand: Stand, until: Make) -> None:
    stand.gate.let(N)
    began = time.monotonic()
    with stand.load(400) as lease:
        assert lease.wait_units(1).all()
        out = np.zeros((N, PAGE), np.uint8)
        assert lease.copy_units(0, 1, out).all()
        assert not lease.copy_units(1, 2, out).any()
        assert 0.3 < time.monotonic() - began < 10
        assert lease.tier.tolist() == [MISS] * N
        assert not lease.copy_to(out).any()
        assert lease.prefix == 0
    assert stand.counters().late_pages == N
    stand.gate.open_up()
    assert until(stand.at_rest)
    assert stand.client.lookup(stand.keys).tiers.tolist() == [1] * N
    assert stand.counters().hits_l2 == 0


@pytest.mark.parametrize("units", [0, 2])
def test_given_back_while_pages_land(stand: Stand, until: Make, units: int) -> None:
    lease = stand.load()
    if units:
        stand.gate.let(N * units)
        assert lease.wait_units(units).all()
    lease.release()
    assert until(lambda: not stand.cache.book.leases)
    stand.gate.open_up()
    assert until(stand.at_rest)
    assert stand.client.lookup(stand.keys).tiers.tolist() == [1] * N
    with stand.load() as again:
        out = np.zeros((N, PAGE), np.uint8)
        assert again.copy_to(out).all()
        assert np.array_equal(out, stand.bytes)


@pytest.mark.parametrize("how", ["close", "die"])
def test_a_client_that_goes_while_it_waits(
    stand: Stand, connect: Make, until: Make, how: str
) -> None:
    other = connect(stand.agent.socket(), GEOMETRY)
    lease = other.load(stand.keys, layered=True, deadline_milliseconds=20_000)
    layered = stand.agent.loop._channels["default"].dispatcher.layered
    connection = other._link.connection
    connection.send(p.Await(connection.next_id(), connection.welcome.boot, lease._number, 4))
    assert until(lambda: layered.waiting == 1)
    connection.send(p.Await(connection.next_id(), connection.welcome.boot, lease._number, 3))
    if how == "close":
        other.close()
    else:
        connection._lifeline.close()
    assert until(lambda: not stand.cache.book.leases)
    assert layered.waiting == 0
    stand.gate.open_up()
    assert until(stand.at_rest)


def test_two_who_want_the_same_pages_wait_for_one_read(
    stand: Stand, connect: Make, until: Make
) -> None:
    other = connect(stand.agent.socket(), GEOMETRY)
    with (
        stand.load() as lease,
        other.load(stand.keys, layered=True, deadline_milliseconds=20_000) as second,
    ):
        stand.gate.let(N)
        assert lease.wait_units(1).all()
        assert second.wait_units(1).all()
        stand.gate.open_up()
        out = np.zeros((N, PAGE), np.uint8)
        assert second.copy_to(out).all()
        assert np.array_equal(out, stand.bytes)
    assert until(stand.at_rest)
    assert stand.counters().promoted_l2 == N


def test_hits_are_those_that_came(stand: Stand, until: Make) -> None:
    """Told at the end, and of a lease that was given back early what was there by then."""
    client = stand.client
    client.lookup(stand.keys, total_tokens=16 * N)
    lease = stand.load()
    stand.gate.let(3 * N + 2)  # the last units of two pages among them
    number = client._link.connection.welcome.client
    # By calls a unit is told of when it is there of all pages.
    whole = 2 if stand.gate.rings else 0
    assert until(
        lambda: (
            sorted(stand.agent.call(lambda: stand.cache.units(number, lease._number)).tolist())
            == [3] * (N - whole) + [4] * whole
        )
    )
    order = stand.agent.call(lambda: stand.cache.units(number, lease._number))
    lead = int(np.argmin(order == 4)) if whole else 0
    lease.release()
    assert until(lambda: not stand.cache.book.leases)
    stand.gate.open_up()
    assert until(stand.at_rest)
    tally = stand.agent.loop._channels["default"].dispatcher.accounts.tally
    # Behind a gap an engine computes anyway. (The stand asked for all pages, and loaded none.)
    assert tally.pages == [0, 0, lead, N - lead + N + 3]
    assert stand.counters().hits_l2 == whole
    before = tally.pages[3]
    client.lookup(stand.keys, total_tokens=16 * N)
    with stand.load() as lease:
        assert lease.copy_to(np.zeros((N, PAGE), np.uint8)).all()
    assert until(lambda: tally.pages[1] == N)
    assert tally.pages[3] == before


def flip(stand: Stand, index: int, offset: int) -> None:
    """A bit of the page on NVMe, at this byte of its slot."""
    table, l2 = stand.cache.table, stand.agent.core.nvme.l2
    row = table.lookup(stand.keys[index : index + 1])
    number, first = divmod(int(table.l2_slot[row][0]), l2.per_segment)
    with l2.segments[number][0].path.open("r+b") as file:
        file.seek(first * l2.stride + offset)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 4]))


@pytest.mark.parametrize("unit", range(4))
def test_a_flipped_bit_in_a_unit_on_the_drive_is_never_served(
    stand: Stand, until: Make, unit: int
) -> None:
    flip(stand, 2, HEADER_BYTES + form_of(GEOMETRY).start(unit + 1) - 1)
    stand.gate.let(4 * N)
    with stand.load() as lease:
        out = np.zeros((N, PAGE), np.uint8)
        for each in range(4):
            good = lease.copy_units(each, each + 1, out)
            # Behind the damage, or where the agent has found it itself by now, it is a miss.
            assert good[[0, 1, 3, 4]].all()
            if each == unit:
                assert not good[2]
        assert np.array_equal(out[[0, 1, 3, 4]], stand.bytes[[0, 1, 3, 4]])
    stand.gate.open_up()
    assert until(stand.at_rest)
    assert stand.counters().quarantined_pages == 1
    assert stand.counters().suspected_segments == 1
    assert stand.client.lookup(stand.keys).prefix == 2


def test_damage_that_an_engine_finds_first_makes_its_segment_suspect_too(
    stand: Stand, until: Make
) -> None:
    flip(stand, 2, HEADER_BYTES)
    stand.gate.let(N)
    with stand.load() as lease:
        good = lease.copy_units(0, 1, np.zeros((N, PAGE), np.uint8))
        assert good.tolist() == [True, True, False, True, True]
    assert until(lambda: stand.counters().quarantined_pages == 1)
    stand.gate.open_up()
    assert until(stand.at_rest)
    assert stand.counters().quarantined_pages == 1
    assert stand.counters().suspected_segments == 1


@pytest.mark.parametrize("offset", [HEADER.itemsize, HEADER.itemsize + 31, 40])
def test_of_a_page_whose_header_is_damaged_nothing_is_announced(
    stand: Stand, until: Make, offset: int
) -> None:
    flip(stand, 1, offset)
    with stand.load() as lease:
        stand.gate.let(3 * N)
        landed = stand.agent.call
        others = [0, 2, 3, 4]
        client = stand.client._link.connection.welcome.client
        assert until(
            lambda: (landed(lambda: stand.cache.units(client, lease._number))[others] == 3).all()
        )
        assert landed(lambda: stand.cache.units(client, lease._number))[1] == 0
        stand.gate.open_up()
        out = np.zeros((N, PAGE), np.uint8)
        assert lease.copy_units(0, 4, out).tolist() == [True, False, True, True, True]
    assert until(stand.at_rest)
    assert stand.counters().quarantined_pages == 1


def test_a_flipped_bit_in_the_sums_behind_a_page_in_memory(stand: Stand, until: Make) -> None:
    """What is verified by them is not believed any more; the page as a whole needs none."""
    stand.gate.open_up()
    key, page = stand.pages.keys[-1:], stand.pages.bytes[-1:]
    out = np.zeros((1, PAGE), np.uint8)
    with stand.client.load(key, layered=True) as lease:
        start = int(lease._offset[0]) + 36864
        stand.agent.core.l1.bytes[start + 9] ^= 1
        assert stand.client.load(key).copy_to(out).all()
        assert np.array_equal(out, page)
        assert not lease.copy_units(2, 3, out).any()
        assert not lease.copy_units(0, 1, out).any()
    assert until(lambda: stand.counters().quarantined_pages == 1)
    assert stand.client.lookup(key).prefix == 0


def test_a_client_scribbles_over_a_unit_that_has_landed(stand: Stand, until: Make) -> None:
    with stand.load() as lease:
        stand.gate.let(2 * N)
        assert lease.wait_units(2).all()
        stand.agent.core.l1.bytes[int(lease._offset[3]) + 10_240 + 77] ^= 1
        out = np.zeros((N, PAGE), np.uint8)
        assert lease.copy_units(0, 1, out).all()
        assert lease.copy_units(1, 2, out).tolist() == [True, True, True, False, True]
        stand.gate.open_up()
        assert lease.copy_units(2, 4, out).tolist() == [True, True, True, False, True]
    assert until(stand.at_rest)
    assert stand.counters().quarantined_pages == 1


def test_a_lease_that_ran_out(make_agent: Make, connect: Make, pages_of: Make) -> None:
    agent = make_agent(l0=0, l1=8 * SLOT, l2=0, lease_seconds=1)
    client, pages = connect(agent.socket(), GEOMETRY), pages_of(7, 2, PAGE)
    assert client.put(pages.keys, pages.bytes).stored == 2
    lease = client.load(pages.keys, layered=True)
    lease._landed[:] = 1  # as if nothing else had been heard
    time.sleep(1.5)
    assert not lease.wait_units(4).any()
    assert not lease.copy_units(0, 1, np.zeros((2, PAGE), np.uint8)).any()
    lease.release()


def test_nobody_waits_for_a_lease_of_another(stand: Stand, connect: Make) -> None:
    other = connect(stand.agent.socket(), GEOMETRY)
    with stand.load() as lease:
        connection = other._link.connection
        message = p.Await(connection.next_id(), connection.welcome.boot, lease._number, 4)
        _, columns = connection.request(message, (), 5.0, p.Landed)
        assert len(columns[0]) == 0
        connection.send(p.Release(0, connection.welcome.boot, lease._number))
        stand.gate.open_up()
        assert lease.wait_units(4).all()


def test_no_agent_no_units(tmp_path: Any) -> None:
    client = Client(tmp_path / "none.sock", GEOMETRY, timeout_seconds=0.2)
    with client.load(np.zeros((3, 16), np.uint8), layered=True) as lease:
        assert not lease.wait_units(1).any()
        assert not lease.copy_units(0, 4, np.zeros((3, PAGE), np.uint8)).any()
        assert (len(lease), lease.prefix) == (3, 0)
    client.close()


def test_an_agent_of_before_brings_pages_up_whole(
    make_agent: Make, connect: Make, pages_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply, load = Dispatcher._reply, p.Load

    def of_before(self: Dispatcher, identity: bytes, said: p.Reply, *buffers: bytes) -> None:
        if isinstance(said, p.Welcome):
            said = msgspec.structs.replace(said, protocol=p.UNITS_SINCE - 1)
        reply(self, identity, said, *buffers[:4])

    monkeypatch.setattr(Dispatcher, "_reply", of_before)
    agent = make_agent(l0=0, l1=8 * SLOT, l2=0)
    client, pages = connect(agent.socket(), GEOMETRY), pages_of(7, 4, PAGE)
    assert client.put(pages.keys[:3], pages.bytes[:3]).stored == 3
    assert load is p.Load
    with client.load(pages.keys, layered=True) as lease:
        assert lease.units == 4
        out = np.zeros((4, PAGE), np.uint8)
        for unit in range(4):
            assert lease.copy_units(unit, unit + 1, out).tolist() == [True] * 3 + [False]
        assert np.array_equal(out[:3], pages.bytes[:3])


def test_an_agent_that_dies_meanwhile(
    start_agent: Make, connect: Make, pages_of: Make, until: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # its units are those of real pages
    big = Geometry(layers=5, kv_heads=1, head_size=20_480, dtype_bytes=1, page_tokens=16)
    slot = big.slot_bytes
    process = start_agent(l0=0, l1=3 * slot, l2=30 * slot, throttle=6 << 20)
    client, pages = connect(process.socket(), big), pages_of(7, 5, big.page_bytes)
    for i in range(5):
        one = slice(i, i + 1)
        assert until(lambda one=one: client.put(pages.keys[one], pages.bytes[one]).stored == 1, 30)
    assert until(lambda: client.lookup(pages.keys[:1]).tiers[0] == 2, 30)
    lease = client.load(pages.keys[:1], layered=True, deadline_milliseconds=30_000)
    killer = threading.Timer(0.1, process.kill)
    killer.start()
    began = time.monotonic()
    assert not lease.wait_units(lease.units).any()
    assert time.monotonic() - began < 10
    lease.release()
    killer.join()
