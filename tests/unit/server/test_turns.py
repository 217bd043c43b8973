"""One client, several threads: no call waits longer than it may, and none is the other's victim."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.results import MISS
from kvtier_agent.server.client import AgentTimeoutError, Client, Stored

LONG = 60.0


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def impatient(client: Client, seconds: float) -> None:
    """From now on; until then what is prepared has the time that a busy machine needs."""
    client.timeout_seconds = client._link.timeout_seconds = seconds


class Held:
    """The agent's cache thread, held up until ``go``."""

    def __init__(self, agent: Any) -> None:
        self._go = threading.Event()
        reached = threading.Event()
        self.done = agent.loop.post(lambda: (reached.set(), self._go.wait(LONG)))
        assert reached.wait(LONG)

    def go(self) -> None:
        self._go.set()
        self.done.result(LONG)


@pytest.fixture
def hold(agent: Any) -> Iterator[Callable[[], Held]]:
    held: list[Held] = []

    def make() -> Held:
        held.append(Held(agent))
        return held[-1]

    yield make
    for one in held:
        one.go()


def in_the_turn(client: Client, pages: Any, deadline_milliseconds: int) -> threading.Thread:
    """A thread whose ``load`` has the client's turn."""
    connection = client._link.connection
    assert connection is not None
    asked, request = threading.Event(), connection.request

    def told(*given: Any) -> Any:
        asked.set()
        return request(*given)

    connection.request = told  # type: ignore[method-assign]
    thread = threading.Thread(
        target=lambda: client.load(
            pages.keys, deadline_milliseconds=deadline_milliseconds
        ).release(),
        daemon=True,
    )
    thread.start()
    assert asked.wait(LONG)
    connection.request = request  # type: ignore[method-assign]
    return thread


def test_a_call_does_not_wait_out_the_long_load_of_another_thread(
    agent: Any, connect: Callable[..., Client], pages_of: Callable[..., Any], hold: Any
) -> None:
    client, pages = connect(agent.socket()), pages_of(1, 4)
    assert client.wait_connected(LONG)
    assert client.put(pages.keys, pages.bytes).stored == 4
    lease, reservation = client.load(pages.keys), client.reserve(pages_of(2, 2).keys)
    impatient(client, 0.2)
    late = hold()
    other = in_the_turn(client, pages, 600_000)
    found = client.lookup(pages.keys)
    assert (found.tiers == MISS).all()
    assert client.counters.timeouts == 1
    assert "other calls" in client.counters.last_error
    assert client.load(pages.keys, deadline_milliseconds=10).prefix == 0
    assert set(client.put(pages.keys, pages.bytes).status.tolist()) == {Stored.NO_AGENT}
    reservation.write_rows(memoryview(bytes(2 * client.page_bytes)))
    assert set(reservation.commit().tolist()) == {Stored.NO_AGENT}
    lease.release()
    assert client.counters.timeouts == 4
    assert other.is_alive(), "all of this came back while the other call still waited"
    late.go()
    other.join(LONG)
    assert not other.is_alive()
    impatient(client, LONG)
    assert client.lookup(pages.keys).prefix == 4
    held = client.stats()
    assert (held["leases"], held["reservations"]) == (0, 0), "sent when the turn was over"


def test_who_wants_errors_hears_that_its_turn_did_not_come(
    agent: Any, connect: Callable[..., Client], pages_of: Callable[..., Any], hold: Any
) -> None:
    client = connect(agent.socket(), raise_errors=True)
    pages = pages_of(1, 4)
    assert client.wait_connected(LONG)
    impatient(client, 0.2)
    late = hold()
    other = in_the_turn(client, pages, 600_000)
    with pytest.raises(AgentTimeoutError, match="other calls"):
        client.lookup(pages.keys)
    late.go()
    other.join(LONG)
    impatient(client, LONG)
    assert client.ping()


def test_closing_does_not_wait_out_a_long_load_either(
    agent: Any, connect: Callable[..., Client], pages_of: Callable[..., Any], hold: Any, until: Any
) -> None:
    client, pages = connect(agent.socket()), pages_of(1, 4)
    assert client.wait_connected(LONG)
    impatient(client, 0.2)
    late = hold()
    other = in_the_turn(client, pages, 600_000)
    client.close()
    assert other.is_alive()
    late.go()
    other.join(LONG)
    assert not client.connected
    assert until(lambda: not agent.call(lambda: list(agent.loop._channels["default"].sessions)))


def test_pages_that_came_too_late_for_the_client_are_misses(
    agent: Any, connect: Callable[..., Client], pages_of: Callable[..., Any], hold: Any, until: Any
) -> None:
    client, pages = connect(agent.socket()), pages_of(1, 4)
    assert client.wait_connected(LONG)
    assert client.put(pages.keys, pages.bytes).stored == 4
    accounts = agent.loop._channels["default"].dispatcher.accounts
    assert client.lookup(pages.keys, request=7).prefix == 4
    impatient(client, 0.3)
    late = hold()
    assert client.load(pages.keys, request=7).prefix == 0
    late.go()
    impatient(client, LONG)
    assert until(lambda: agent.call(lambda: accounts.tally.asked_pages) == 4)
    assert agent.call(lambda: list(accounts.tally.pages)) == [0, 0, 0, 4]
    assert until(lambda: client.stats().get("leases") == 0)
    assert agent.call(lambda: agent.core.cache.counters.quarantined_pages) == 0


def test_a_client_that_nobody_holds_says_goodbye(
    agent: Any, connect: Callable[..., Client], pages_of: Callable[..., Any], until: Any
) -> None:
    geometry = connect(agent.socket()).geometry
    before, files = threading.active_count(), open_files()
    made = [Client(agent.socket(), geometry) for _ in range(5)]
    links = [weakref.ref(client._link) for client in made]
    kept, pages = made[0], pages_of(1, 4)
    assert kept.wait_connected(LONG)
    assert kept.put(pages.keys, pages.bytes).stored == 4
    lease = kept.load(pages.keys)
    del made, kept
    gc.collect()
    assert until(lambda: [link() is None for link in links] == [False] + [True] * 4)
    out = np.zeros_like(pages.bytes)
    assert lease.copy_to(out).all(), "a lease keeps its client's connection"
    lease.release()
    del lease
    sessions = agent.loop._channels["default"].sessions
    assert until(lambda: agent.call(lambda: len(sessions)) == 1), "that of the fixture"
    assert until(lambda: threading.active_count() <= before)
    assert until(lambda: open_files() <= files)


def test_a_client_dropped_without_an_agent_leaves_no_thread(folder: Any, until: Any) -> None:
    before = threading.active_count()
    for _ in range(3):
        Client(folder / "none.sock", Geometry.of_page_bytes(4096, 16))
    gc.collect()
    assert until(lambda: threading.active_count() <= before)
