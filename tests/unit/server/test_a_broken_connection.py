"""What goes wrong below the protocol is an absent agent to callers, and the client goes on looking;
a late answer gives back exactly what it granted."""

from __future__ import annotations

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
    [OSError(24, "Too many open files"), zmq.ZMQError(24), p.MalformedError("no such message")],
    ids=["system", "zmq", "protocol"],
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
