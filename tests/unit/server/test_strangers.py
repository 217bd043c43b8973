"""Whoever speaks to the socket, and whatever they say: a clear answer, and the agent lives on."""

from __future__ import annotations

import itertools
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.server import protocol as p
from kvtier_agent.server.client import Client
from raw_peer import INFO, Raw


def restarts(agent: Any, loop: str) -> int:
    return next(x.restarts for x in agent.supervisor.health() if x.name == loop)


@pytest.fixture
def raw(agent: Any) -> Iterator[Raw]:
    one = Raw(agent.socket())
    yield one
    one.close()


def refused(reply: p.Reply) -> tuple[str, str]:
    assert isinstance(reply, p.Refused), reply
    return reply.code, reply.message


def test_another_protocol_version_is_told_what_fits(raw: Raw) -> None:
    code, message = refused(raw.hello(oldest=98, newest=99))
    assert code == p.Code.PROTOCOL_VERSION
    assert "98 to 99" in message
    assert "use a client of this agent's release or the one before" in message


def test_a_newer_client_that_still_speaks_ours_is_served(raw: Raw) -> None:
    reply = raw.hello(oldest=p.PROTOCOL, newest=p.PROTOCOL + 1)
    assert isinstance(reply, p.Welcome)
    assert reply.protocol == p.PROTOCOL


def test_another_arena_layout_or_key_version_is_refused(raw: Raw) -> None:
    assert refused(raw.hello(arena_layout=77))[0] == p.Code.ARENA_LAYOUT
    assert refused(raw.hello(key_version=77))[0] == p.Code.KEY_VERSION


def test_a_second_geometry_is_refused_with_the_reason(raw: Raw) -> None:
    assert isinstance(raw.hello(), p.Welcome)
    other = p.GeometryInfo.of(Geometry.of_page_bytes(32768, 16))
    code, message = refused(raw.hello(geometry=other))
    assert code == p.Code.GEOMETRY
    assert len(message) > 20


def test_a_geometry_that_makes_no_sense_is_refused_with_advice(raw: Raw) -> None:
    code, message = refused(raw.hello(geometry=p.GeometryInfo(0, 1, 1, 1, 1)))
    assert code == p.Code.GEOMETRY
    assert "write a whole number" in message


def test_names_that_no_client_could_repeat_are_refused(raw: Raw) -> None:
    """The readiness probe is a client too: it would fail on every domain of the agent."""
    long = msgspec.structs.replace(INFO, weights="\U0001f600" * 256)
    code, message = refused(raw.hello(geometry=long))
    assert code == p.Code.GEOMETRY
    assert "give at most 256 characters, 1000 bytes" in message


def test_who_said_no_hello_is_told_so(raw: Raw) -> None:
    assert refused(raw.ask(p.Lookup(5), bytes(16)))[0] == p.Code.UNKNOWN_CLIENT


def test_without_a_lifeline_nothing_is_served(raw: Raw) -> None:
    assert isinstance(raw.hello(), p.Welcome)
    assert refused(raw.ask(p.Lookup(5), bytes(16)))[0] == p.Code.NO_LIFELINE


def test_a_client_whose_lifeline_does_not_come_is_dropped(
    make_agent: Callable[..., Any], until: Callable[..., bool]
) -> None:
    agent = make_agent(server={"lifeline_grace_seconds": 0.3, "snapshot_seconds": 0.05})
    raw = Raw(agent.socket())
    try:
        assert isinstance(raw.hello(), p.Welcome)
        numbers = itertools.count(5)
        said = lambda: refused(raw.ask(p.Ping(next(numbers))))[0]  # noqa: E731
        assert until(lambda: said() == p.Code.UNKNOWN_CLIENT)
        assert until(lambda: agent.loop.snapshot.domains["default"].clients == 0)
    finally:
        raw.close()


def test_a_lifeline_needs_the_secret_of_its_client(raw: Raw) -> None:
    welcome = raw.hello()
    assert isinstance(welcome, p.Welcome)
    line = raw.lifeline(welcome, secret=bytes(32))
    assert line.recv(16) == b""
    line.close()
    assert refused(raw.ask(p.Ping(5)))[0] == p.Code.NO_LIFELINE
    line = raw.lifeline(welcome)
    assert line.recv(16) == p.LIFELINE_ARENAS.pack(1, 2)
    assert isinstance(raw.ask(p.Ping(6)), p.Pong)
    line.close()


def test_a_lifeline_that_sends_rubbish_is_closed(raw: Raw) -> None:
    line = socket.socket(socket.AF_UNIX)
    line.settimeout(5)
    line.connect(str(raw.path.with_suffix(".life")))
    line.sendall(b"GET / HTTP/1.1\r\nHost: an innocent browser here\r\n\r\n")
    assert line.recv(16) == b""
    line.close()


def test_silent_lifelines_are_closed_after_the_grace_time(
    make_agent: Callable[..., Any],
) -> None:
    agent = make_agent(server={"lifeline_grace_seconds": 0.2, "snapshot_seconds": 0.05})
    line = socket.socket(socket.AF_UNIX)
    line.settimeout(5)
    line.connect(str(agent.socket().with_suffix(".life")))
    assert line.recv(16) == b""
    line.close()


@pytest.fixture
def known(raw: Raw) -> Iterator[tuple[Raw, p.Welcome]]:
    welcome = raw.hello()
    assert isinstance(welcome, p.Welcome)
    line = raw.lifeline(welcome)
    line.recv(16)
    yield raw, welcome
    line.close()


def test_what_another_boot_granted_is_refused(known: tuple[Raw, p.Welcome]) -> None:
    raw, welcome = known
    reply = raw.ask(p.Commit(5, welcome.boot + 1), bytes(16), bytes(8))
    assert refused(reply)[0] == p.Code.STALE_BOOT


def test_too_many_keys_are_told_the_limit(
    make_agent: Callable[..., Any],
) -> None:
    agent = make_agent(server={"max_keys": 100})
    raw = Raw(agent.socket())
    try:
        welcome = raw.hello()
        assert isinstance(welcome, p.Welcome)
        with raw.lifeline(welcome) as line:
            line.recv(16)
            code, message = refused(raw.ask(p.Lookup(5), bytes(16 * 101)))
        assert code == p.Code.TOO_MANY_KEYS
        assert "at most 100" in message
    finally:
        raw.close()


@pytest.mark.parametrize(
    "buffers",
    [(), (bytes(17),), (bytes(16), bytes(16)), tuple(bytes(16) for _ in range(50))],
    ids=["none", "cut", "too-many", "far-too-many"],
)
def test_buffers_that_do_not_fit_are_malformed(
    known: tuple[Raw, p.Welcome], buffers: tuple[bytes, ...]
) -> None:
    assert refused(known[0].ask(p.Lookup(5), *buffers))[0] == p.Code.MALFORMED


def test_a_commit_with_a_cut_column_is_malformed(known: tuple[Raw, p.Welcome]) -> None:
    raw, welcome = known
    reply = raw.ask(p.Commit(5, welcome.boot), bytes(32), bytes(15))
    assert refused(reply)[0] == p.Code.MALFORMED


def test_a_release_of_a_lease_that_never_was_changes_nothing(
    known: tuple[Raw, p.Welcome],
) -> None:
    raw, welcome = known
    for bad in (b"", np.array([0, 7, 2**32 - 1], "<u4").tobytes()):
        raw.socket.send_multipart([p.encode(p.Release(0, welcome.boot, 12345)), bad])
    assert isinstance(raw.ask(p.Ping(9)), p.Pong)


def test_a_bad_index_outside_the_lease_is_no_harm(
    agent: Any, connect: Callable[..., Client], pages_of: Callable[..., Any]
) -> None:
    client, pages = connect(agent.socket()), pages_of(1, 2)
    client.put(pages.keys, pages.bytes)
    lease = client.load(pages.keys)
    link = client._link
    assert link.connection is not None
    link.end_lease(link.connection, lease._number, np.array([5, 2**31], "<u4"))
    assert client.ping()
    assert client.lookup(pages.keys).prefix == 2


def test_a_message_beyond_all_bounds_costs_its_sender_the_connection_only(
    agent: Any, raw: Raw, connect: Callable[..., Client], until: Callable[..., bool]
) -> None:
    client = connect(agent.socket())
    raw.socket.send_multipart(
        [p.encode(p.Lookup(5)), bytes(agent.loop.settings.max_frame_bytes + 1)]
    )
    assert not raw.socket.poll(300)
    assert until(lambda: agent.loop.snapshot.domains["default"].ended_connections >= 1)
    assert client.ping()


def test_who_does_not_shake_hands_properly_is_dropped_and_counted(
    agent: Any, until: Callable[..., bool]
) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(5)
        stranger.connect(str(agent.socket()))
        # A greeting of version 3 with a mechanism that nobody has.
        stranger.sendall(b"\xff" + bytes(7) + b"\x01\x7f\x03\x00" + b"NOBODY".ljust(52, b"\0"))
        assert until(lambda: agent.loop.snapshot.domains["default"].failed_handshakes >= 1)


def test_one_client_too_many_is_told_the_limit(make_agent: Callable[..., Any]) -> None:
    agent = make_agent(server={"max_clients": 2})
    raws = [Raw(agent.socket()) for _ in range(3)]
    try:
        replies = [raw.hello() for raw in raws]
        assert refused(replies[2])[0] == p.Code.TOO_MANY_CLIENTS
    finally:
        for raw in raws:
            raw.close()


def test_a_hundred_thousand_messages_of_garbage(
    agent: Any,
    raw: Raw,
    connect: Callable[..., Client],
    pages_of: Callable[..., Any],
    until: Callable[..., bool],
) -> None:
    """Random bytes, mutated headers, cut buffers, from a stranger and from a known client."""
    rng = random.Random(5)
    honest, pages = connect(agent.socket(), timeout_seconds=10.0), pages_of(1, 8)
    assert honest.put(pages.keys, pages.bytes).stored == 8
    welcome = raw.hello()
    assert isinstance(welcome, p.Welcome)
    line = raw.lifeline(welcome)
    line.recv(16)
    stranger = raw.dial()
    boot = welcome.boot
    requests: list[p.Request] = [
        p.Hello(1, 1, 1, 1, 1, INFO), p.Lookup(1), p.Reserve(1), p.Commit(1, boot),
        p.Abort(0, boot), p.Load(1, 1), p.Release(0, boot, 3), p.Pin(1, boot), p.Unpin(0, boot),
        p.Delete(1, boot), p.Stats(1), p.Ping(1), p.Await(1, boot, 3, 2),
        p.Load(1, 1, layered=True),
    ]  # fmt: skip
    # All there are but the one after which the known client would be a stranger.
    assert {type(m) for m in requests} == set(p.Request.__subclasses__()) - {p.Bye}
    seeds = [p.encode(m) for m in requests]
    keys = pages.keys.tobytes()
    sent = 0
    for turn in range(100_000):
        header = bytearray(rng.choice(seeds))
        kind = rng.random()
        if kind < 0.3:
            header = bytearray(rng.randbytes(rng.randint(0, 40)))
        elif kind < 0.9:
            header[rng.randrange(len(header))] = rng.randrange(256)
        frames: list[bytes] = [bytes(header)]
        for _ in range(rng.choice([0, 1, 1, 1, 2, 2, 6])):
            start = rng.randrange(len(keys))
            frames.append(
                keys[:16] if rng.random() < 0.3 else keys[start : start + rng.randint(0, 64)]
            )
        to = raw.socket if rng.random() < 0.5 else stranger
        to.send_multipart(frames)
        sent += 1
        if turn % 10_000 == 0:
            assert honest.ping(), "the others are not answered meanwhile"
        if turn % 50 == 0:
            for one in (raw.socket, stranger):
                while one.poll(0):
                    one.recv_multipart()
    assert until(lambda: agent.loop.snapshot.domains["default"].messages >= sent * 0.95, seconds=60)
    assert agent.supervisor.causes() == []
    assert restarts(agent, "cache") == 0
    snapshot = agent.loop.snapshot.domains["default"]
    assert snapshot.refused_messages[p.Code.MALFORMED] > 20_000
    assert snapshot.refused_messages.get(p.Code.INTERNAL, 0) == 0
    line.close()
    out = np.zeros((8, honest.page_bytes), np.uint8)
    with honest.load(pages.keys) as lease:
        good = lease.copy_to(out)
    assert np.array_equal(out[good], pages.bytes[good])
    assert until(lambda: honest.stats()["reservations"] == 0 and honest.stats()["leases"] == 0)


def test_ports_knocked_at_and_left_do_not_add_up(agent: Any, until: Callable[..., bool]) -> None:
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    for _ in range(100):
        for suffix in (".sock", ".life"):
            knock = socket.socket(socket.AF_UNIX)
            knock.connect(str(agent.socket().with_suffix(suffix)))
            knock.close()
    assert until(lambda: sum(1 for _ in Path("/proc/self/fd").iterdir()) <= before + 4)


def test_a_browser_at_the_message_socket_is_no_harm(
    agent: Any, connect: Callable[..., Client]
) -> None:
    client = connect(agent.socket())
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(agent.socket()))
        stranger.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10)
        assert client.ping()
    assert client.ping()


def test_an_engine_that_gave_a_try_up_and_came_again_has_one_pool(
    agent: Any, raw: Raw, until: Callable[..., bool]
) -> None:
    """Where L0 is the engine's the DRAM tier follows its pool, and does not shrink again."""

    def pool() -> int:
        return int(agent.loop.snapshot.domains["default"].engine_pool_bytes)

    assert isinstance(raw.hello(kv_pool_bytes=8 << 20), p.Welcome)
    again = Raw(agent.socket())
    try:
        welcome = again.hello(kv_pool_bytes=8 << 20)
        assert isinstance(welcome, p.Welcome)
        with again.lifeline(welcome):
            seen: set[int] = set()

            def settled() -> bool:
                seen.add(pool())
                return 8 << 20 in seen

            assert until(settled)
            assert seen <= {0, 8 << 20}
            assert agent.loop.snapshot.domains["default"].clients == 2
    finally:
        again.close()
