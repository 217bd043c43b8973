"""A client that asks faster than it is answered waits in its own memory, not in the agent's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import zmq


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
