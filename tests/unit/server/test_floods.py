"""A client that asks faster than it is answered waits in its own memory, not in the agent's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import zmq
from kvtier_agent.server import protocol as p
from kvtier_agent.server.client import Client
from raw_peer import Raw


def test_what_a_flood_leaves_in_the_agent_is_bounded(
    make_agent: Any, until: Callable[..., bool]
) -> None:
    agent = make_agent()
    agent.supervisor.kill("cache", hold=True)  # nothing is taken from the socket any more
    assert until(lambda: not all(x.ok for x in agent.supervisor.health()))
    context = zmq.Context()
    flood = context.socket(zmq.DEALER)
    flood.setsockopt(zmq.SNDHWM, 1)
    flood.setsockopt(zmq.SNDBUF, 65_536)
    flood.setsockopt(zmq.LINGER, 0)
    flood.connect(f"ipc://{agent.socket()}")
    message = [b"x" * 64, b"k" * 500_000]
    taken, stalled = 0, 0.0
    while stalled < 0.5 and taken < 500:
        try:
            flood.send_multipart(message, zmq.NOBLOCK)
            taken, stalled = taken + 1, 0.0
        except zmq.Again:
            time.sleep(0.01)
            stalled += 0.01
    flood.close()
    context.term()
    agent.supervisor.revive("cache")
    # What waits in the agent, one with the client, and what is on its way between them.
    assert 1 <= taken <= 32 + 8


def test_what_is_never_read_is_dropped_and_not_kept(
    make_agent: Any, until: Callable[..., bool]
) -> None:
    agent = make_agent()
    raw = Raw(agent.socket())
    try:
        raw.socket.close(0)
        raw.socket = raw.context.socket(zmq.DEALER)
        raw.socket.setsockopt(zmq.RCVHWM, 1)
        raw.socket.setsockopt(zmq.RCVBUF, 65_536)
        raw.socket.setsockopt(zmq.SNDTIMEO, 10_000)
        raw.socket.connect(f"ipc://{agent.socket()}")
        welcome = raw.hello()
        assert isinstance(welcome, p.Welcome)
        with raw.lifeline(welcome) as line:
            line.recv(2)
            absent = np.random.default_rng(1).bytes(16 * 20_000)
            for number in range(120):
                raw.socket.send_multipart([p.encode(p.Load(number + 2)), absent])
            # Some are on their way between the two.
            wanted = 120 - 64 - 16
            dropped = lambda: agent.loop.snapshot.domains["default"].dropped_replies  # noqa: E731
            assert until(lambda: dropped() >= wanted, 30)
    finally:
        raw.close()


def test_leases_are_as_long_as_what_was_found(
    agent: Any, connect: Callable[..., Client], pages_of: Callable[..., Any]
) -> None:
    client, pages = connect(agent.socket()), pages_of(1, 3)
    client.put(pages.keys, pages.bytes)
    absent = np.random.default_rng(2).integers(0, 256, (65_000, 16), dtype=np.uint8)
    with client.load(np.concatenate([pages.keys, absent])) as lease:
        assert len(lease) == 65_003
        assert lease.prefix == 3

        def kept() -> int:
            columns = [
                getattr(one, name)
                for one in agent.core.cache.book.leases.values()
                for name in ("rows", "tier", "arena", "offset", "checksum", "held")
            ]
            accounts = agent.loop._channels["default"].dispatcher.accounts
            columns += [one.tiers for one in accounts._leases.values()]
            assert len(columns) == 7
            return sum((c if c.base is None else c.base).nbytes for c in columns)

        assert agent.call(kept) < 65_003
    assert client.stats()["counters"]["hits_l0"] == 3
