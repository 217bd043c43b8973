"""What goes wrong below the protocol is an absent agent to callers, and the client goes on looking;
a late answer gives back exactly what it granted."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zmq
from kvtier_agent.cache.results import PutStatus
from kvtier_agent.server import connection, link
from kvtier_agent.server import protocol as p
from kvtier_agent.server.client import Client


@pytest.mark.parametrize(
    "problem",
    [
        OSError(24, "Too many open files"),
        zmq.ZMQError(24),
        p.MalformedError("no such message"),
        IndexError("pop from empty list"),
        TypeError("what torch was given"),
        ImportError("torch"),
    ],
    ids=["system", "zmq", "protocol", "index", "type", "import"],
)
def test_a_client_outlives_whatever_happens_while_it_connects(
    problem: Exception,
    make_agent: Callable[..., Any],
    connect: Callable[..., Client],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = make_agent()
    real = link.Connection
    attempts: list[int] = []

    def dial(*args: Any, **options: Any) -> Any:
        attempts.append(1)
        if len(attempts) < 3:
            raise problem
        return real(*args, **options)

    monkeypatch.setattr(link, "Connection", dial)
    client = connect(agent.socket())
    assert not client.connected
    assert "cannot connect" in client.counters.last_error
    assert client.wait_connected(10)


@pytest.mark.parametrize("problem", [IndexError("none left"), TypeError("another torch")], ids=repr)
def test_arenas_that_cannot_be_mapped_are_an_absent_agent(
    problem: Exception,
    agent: Any,
    connect: Callable[..., Client],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = connection.map_arenas

    def fails(infos: Any, descriptors: list[int]) -> Any:
        for descriptor in descriptors:
            os.close(descriptor)
        raise problem

    monkeypatch.setattr(connection, "map_arenas", fails)
    client = connect(agent.socket())
    assert not client.connected
    assert "cannot be mapped" in client.counters.last_error
    monkeypatch.setattr(connection, "map_arenas", real)
    assert client.wait_connected(10)


def test_arenas_that_found_no_descriptor_are_told_as_such(
    agent: Any, connect: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Near its limit of open files a process gets fewer descriptors than were sent."""
    real = connection._receive_arenas

    def short(line: Any) -> tuple[bytes, list[int]]:
        answer, descriptors = real(line)
        os.close(descriptors.pop())
        return answer, descriptors

    monkeypatch.setattr(connection, "_receive_arenas", short)
    client = connect(agent.socket())
    assert not client.connected
    assert "raise this process's limit of open files" in client.counters.last_error
    monkeypatch.setattr(connection, "_receive_arenas", real)
    assert client.wait_connected(10)


def test_the_keeper_outlives_whatever_it_meets(
    agent: Any,
    connect: Callable[..., Client],
    until: Callable[..., bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = connect(agent.socket())
    seen: list[int] = []

    def alive(self: Any) -> bool:
        seen.append(1)
        raise IndexError("an answer cut short")

    monkeypatch.setattr(connection.Connection, "alive", alive)
    assert until(lambda: len(seen) >= 3)
    assert "IndexError: an answer cut short" in client.counters.last_error
    assert client._link._keeper.is_alive()


def test_a_late_answer_gives_back_only_what_it_granted(
    make_agent: Callable[..., Any],
    connect: Callable[..., Client],
    pages_of: Callable[..., Any],
) -> None:
    agent = make_agent()
    client, pages = connect(agent.socket()), pages_of(1, 3)
    mine = client._link.connection
    assert isinstance(mine, connection.Connection)
    held = client.reserve(pages.keys)
    assert (held.status == PutStatus.OFFERED).all()
    late = 10_000
    mine._late[late] = pages.keys.tobytes()
    statuses = np.array([PutStatus.REFUSED_SPACE, PutStatus.BUSY, PutStatus.OFFERED], np.uint8)
    mine._take_late([p.encode(p.Reserved(late)), statuses.tobytes(), b"", b""])
    assert client.ping(), "messages are served in order: the abort has arrived"
    assert agent.call(lambda: agent.core.cache.book.reservations) == 2
