"""Pins and deletions through the socket: who keeps what, for how long, and older peers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from kvtier_agent.cache.results import MISS
from kvtier_agent.cache.snapshot import check_books
from kvtier_agent.server import protocol as p
from kvtier_agent.server.client import Client, Deleted, Pinned
from raw_peer import Raw

Make = Callable[..., Any]
KIB = 1 << 10


@pytest.fixture
def raw_to() -> Iterator[Callable[[Path], Raw]]:
    made: list[Raw] = []

    def make(path: Path) -> Raw:
        made.append(Raw(path))
        return made[-1]

    yield make
    for one in made:
        one.close()


def fill(client: Client, pages_of: Make, count: int = 400) -> None:
    """Other pages, more than DRAM holds."""
    for start in range(0, count, 16):
        pages = pages_of(1000 + start, 16)
        client.put(pages.keys, pages.bytes)


def test_pinned_pages_outlast_any_number_of_others(
    make_agent: Make, connect: Make, pages_of: Make, get: Make, until: Callable[..., bool]
) -> None:
    agent = make_agent(l0=0, l1=128 * 16 * KIB, l2=0)
    client, pages = connect(agent.socket()), pages_of(1, 8)
    client.put(pages.keys, pages.bytes)
    assert client.pin(pages.keys[:4]).tolist() == [Pinned.PINNED] * 4
    fill(client, pages_of)
    assert client.lookup(pages.keys).prefix == 4
    out = np.zeros_like(pages.bytes[:4])
    with client.load(pages.keys[:4]) as lease:
        assert lease.copy_to(out).all()
    assert np.array_equal(out, pages.bytes[:4])
    lines = [
        'kv_pinned_pages{domain="default",layer="1"} 4.0',
        f'kv_pinned_bytes{{domain="default",layer="1"}} {4 * 16384}.0',
        'kv_pins_total{domain="default"} 4.0',
    ]
    port = agent.http.address[1]
    assert until(lambda: all(line in get(port, "/metrics")[1] for line in lines))
    client.unpin(pages.keys[:4])
    assert client.stats()["client_pins"] == 0
    fill(client, pages_of)
    assert client.lookup(pages.keys).prefix == 0
    agent.call(lambda: check_books(agent.core.cache))


def test_pins_end_with_their_client(
    agent: Any, connect: Make, pages_of: Make, until: Callable[..., bool]
) -> None:
    one, other, pages = connect(agent.socket()), connect(agent.socket()), pages_of(1, 4)
    one.put(pages.keys, pages.bytes)
    one.pin(pages.keys)
    other.pin(pages.keys[:1])
    assert other.stats()["client_pins"] == 5
    one.close()
    assert until(lambda: other.stats()["client_pins"] == 1)


def test_pins_end_with_the_agent_and_not_before(
    start_agent: Make, connect: Make, pages_of: Make, until: Callable[..., bool]
) -> None:
    first = start_agent()
    client, pages = connect(first.socket()), pages_of(1, 4)
    client.put(pages.keys, pages.bytes)
    client.pin(pages.keys)
    boot = client.boot
    first.kill()
    second = start_agent()
    assert until(lambda: client.boot not in (0, boot), 30)
    stats = client.stats()
    assert (stats["client_pins"], stats["pinned_pages"]) == (0, 0)
    assert client.pin(pages.keys).max() <= Pinned.ABSENT  # as far as they were taken over
    assert second.stop() == 0


def test_a_pin_of_the_agent_before_is_refused(agent: Any, connect: Make, raw_to: Make) -> None:
    raw = raw_to(agent.socket())
    welcome = raw.hello()
    with raw.lifeline(welcome) as line:
        line.recv(2)
        for message in (p.Pin(7, welcome.boot + 1), p.Delete(8, welcome.boot + 1)):
            reply = raw.ask(message, bytes(16))
            assert isinstance(reply, p.Refused)
            assert reply.code == p.Code.STALE_BOOT


def test_a_client_library_gives_signs_of_life_for_its_pins(
    make_agent: Make, connect: Make, pages_of: Make, until: Callable[..., bool]
) -> None:
    agent = make_agent(cache={"pin_seconds": 1.0})
    client, pages = connect(agent.socket()), pages_of(1, 4)
    client.put(pages.keys, pages.bytes)
    pinned_at = time.monotonic()
    assert (client.pin(pages.keys) == Pinned.PINNED).all()

    def heard() -> float:
        return float(agent.call(lambda: min(agent.core.cache.pins._heard.values(), default=0.0)))

    # No call is made meanwhile, for longer than pins last without any sign.
    assert until(lambda: heard() > pinned_at + 2.0, 30)
    assert agent.call(lambda: agent.core.cache.pins.count) == 4


def test_pins_of_a_client_that_has_fallen_silent_end(
    make_agent: Make, connect: Make, pages_of: Make, raw_to: Make, until: Callable[..., bool]
) -> None:
    agent = make_agent(cache={"pin_seconds": 1.0})
    client, pages = connect(agent.socket()), pages_of(1, 4)
    client.put(pages.keys, pages.bytes)
    raw = raw_to(agent.socket())
    welcome = raw.hello()
    with raw.lifeline(welcome) as line:
        line.recv(2)
        assert isinstance(raw.ask(p.Pin(2, welcome.boot), pages.keys.tobytes()), p.Pinned)
        assert until(lambda: client.stats()["counters"]["expired_pins"] == 4, 30)
        assert client.stats()["clients"] == 2  # alive, as far as its lifeline tells


def test_deleted_pages_are_found_no_more(
    agent: Any, connect: Make, pages_of: Make, get: Make, until: Callable[..., bool]
) -> None:
    client, other, pages = connect(agent.socket()), connect(agent.socket()), pages_of(1, 6)
    client.put(pages.keys, pages.bytes)
    with other.load(pages.keys[:2]) as lease:
        status = client.delete(pages.keys[:4])
        assert status.tolist() == [Deleted.MARKED] * 2 + [Deleted.DELETED] * 2
        assert (client.lookup(pages.keys).tiers[:4] == MISS).all()
        out = np.zeros_like(pages.bytes[:2])
        assert lease.copy_to(out).all()  # who reads them reads on
        assert np.array_equal(out, pages.bytes[:2])
    assert client.delete(pages.keys[:4]).tolist() == [Deleted.ABSENT] * 4
    assert client.put(pages.keys, pages.bytes).stored == 4
    assert until(lambda: client.stats()["pinned_pages"] == 0)
    port = agent.http.address[1]
    assert until(lambda: 'kv_deleted_pages_total{domain="default"} 4.0' in get(port, "/metrics")[1])
    agent.call(lambda: check_books(agent.core.cache))


def test_more_keys_than_one_call_may_name_are_several_calls(
    make_agent: Make, connect: Make, pages_of: Make
) -> None:
    agent = make_agent(server={"max_keys": 3})
    client, pages = connect(agent.socket()), pages_of(1, 8)
    for start in range(0, 8, 2):
        client.put(pages.keys[start : start + 2], pages.bytes[start : start + 2])
    assert client.pin(pages.keys).tolist() == [Pinned.PINNED] * 8
    client.unpin(pages.keys)
    assert client.stats()["client_pins"] == 0
    assert client.delete(pages.keys).tolist() == [Deleted.DELETED] * 8


def test_without_an_agent_nothing_is_pinned(tmp_path: Path, connect: Make, pages_of: Make) -> None:
    client, pages = connect(tmp_path / "none.sock", timeout_seconds=0.2), pages_of(1, 2)
    assert client.pin(pages.keys).tolist() == [Pinned.NO_AGENT] * 2
    assert client.delete(pages.keys).tolist() == [Deleted.NO_AGENT] * 2
    client.unpin(pages.keys)


def test_an_agent_of_the_release_before_is_not_asked(
    agent: Any, connect: Make, pages_of: Make
) -> None:
    client, pages = connect(agent.socket()), pages_of(1, 2)
    client.put(pages.keys, pages.bytes)
    connection = client._link.connection
    connection.welcome = msgspec.structs.replace(
        connection.welcome, protocol=p.PINS_SINCE - 1, pin_milliseconds=0
    )
    assert client.pin(pages.keys).tolist() == [Pinned.UNSUPPORTED] * 2
    assert client.delete(pages.keys).tolist() == [Deleted.UNSUPPORTED] * 2
    client.unpin(pages.keys)
    assert client.lookup(pages.keys).prefix == 2
    assert client.stats()["refused_messages"] == {}


def test_a_client_of_the_release_before_is_served(agent: Any, raw_to: Make) -> None:
    raw = raw_to(agent.socket())
    # As that release wrote it: its version, and none of the fields that came later.
    geometry = msgspec.to_builtins(p.GeometryInfo.of(p.Geometry.of_page_bytes(16384, 16)))
    hello = msgspec.msgpack.encode(["hi", 1, 1, 1, p.ARENA_LAYOUT, 1, geometry, "old", 7, False, 0])
    welcome = raw.ask(hello)
    assert isinstance(welcome, p.Welcome), welcome
    assert welcome.protocol == 1
