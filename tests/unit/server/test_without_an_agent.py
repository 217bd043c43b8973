"""No agent, a restarted agent, an agent that does not answer: a miss, in time, and it mends."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvtier_agent.cache.results import MISS
from kvtier_agent.server import connection
from kvtier_agent.server.client import AgentError, AgentGoneError, Client, Stored

PATIENCE = 3.0
"""Calls bounded by half a second or less must be back by then, on a busy machine too."""


def all_miss(client: Client, pages: Any) -> bool:
    out = np.zeros((len(pages), client.page_bytes), np.uint8)
    with client.load(pages.keys, deadline_milliseconds=100) as lease:
        loaded = lease.copy_to(out).any()
    status = client.put(pages.keys, pages.bytes).status
    return (
        not loaded
        and client.lookup(pages.keys).prefix == 0
        and (status == Stored.NO_AGENT).all()
        and not out.any()
    )


def stands_still(pid: int) -> bool:
    """Are all threads of a process stopped?"""
    stats = [file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def test_without_an_agent_nothing_is_cached(
    folder: Path, connect: Callable[..., Client], pages_of: Callable[..., Any]
) -> None:
    client = connect(folder / "run" / "default.sock")
    assert all_miss(client, pages_of(1, 4))
    assert client.stats() == {}
    assert not client.ping()
    assert "kvtier agent" in client.counters.last_error


def test_who_wants_errors_gets_them(
    folder: Path, connect: Callable[..., Client], pages_of: Callable[..., Any]
) -> None:
    client = connect(folder / "run" / "default.sock", raise_errors=True)
    with pytest.raises(AgentGoneError, match="no agent at"):
        client.lookup(pages_of(1, 1).keys)


def test_an_agent_that_comes_later_is_found(
    folder: Path,
    make_agent: Callable[..., Any],
    connect: Callable[..., Client],
    pages_of: Callable[..., Any],
) -> None:
    client, pages = connect(folder / "run" / "default.sock"), pages_of(1, 4)
    assert not client.connected
    make_agent()
    assert client.wait_connected(10)
    assert client.put(pages.keys, pages.bytes).stored == 4


def test_what_an_agent_granted_is_void_after_its_restart(
    start_agent: Callable[..., Any],
    connect: Callable[..., Client],
    pages_of: Callable[..., Any],
    until: Callable[..., bool],
) -> None:
    first = start_agent(l2=0)
    client, pages, more = connect(first.socket()), pages_of(1, 4), pages_of(2, 4)
    client.put(pages.keys, pages.bytes)
    lease, reservation, boot = client.load(pages.keys), client.reserve(more.keys), client.boot
    first.kill()
    assert until(lambda: not client.connected)
    assert all_miss(client, pages_of(3, 4))
    second = start_agent(l2=0)
    assert client.wait_connected(10)
    assert client.boot not in (0, boot)

    other = connect(second.socket())
    overwrite = pages_of(4, 64)
    other.put(overwrite.keys, overwrite.bytes)
    out = np.zeros((4, client.page_bytes), np.uint8)
    good = lease.copy_to(out)
    for i in range(4):
        assert not good[i] or np.array_equal(out[i], pages.bytes[i])
    lease.release()
    reservation.write_rows(more.bytes.data.cast("B"))
    assert set(reservation.commit().tolist()) <= {Stored.LOST, Stored.NO_AGENT}
    assert client.lookup(more.keys).prefix == 0
    stats = client.stats()
    assert (stats["leases"], stats["reservations"]) == (0, 0)
    assert second.stop() == 0


def test_an_agent_that_hangs_is_a_miss_in_time_and_what_it_grants_late_goes_back(
    start_agent: Callable[..., Any],
    connect: Callable[..., Client],
    pages_of: Callable[..., Any],
    until: Callable[..., bool],
) -> None:
    process = start_agent()
    client = connect(process.socket(), timeout_seconds=0.3)
    pages, more = pages_of(1, 4), pages_of(2, 4)
    assert client.wait_connected(10)
    patient = connect(process.socket())
    assert patient.put(pages.keys, pages.bytes).stored == 4
    process.process.send_signal(signal.SIGSTOP)
    try:
        assert until(lambda: stands_still(process.process.pid)), "a signal takes its time"
        started = time.monotonic()
        assert all_miss(client, more)
        assert (client.load(pages.keys).tier == MISS).all()
        assert time.monotonic() - started < 4 * PATIENCE
        assert client.counters.timeouts >= 3
        silent = client.counters.timeouts
        for _ in range(1000):
            client.lookup(pages.keys)
        assert client.counters.timeouts < silent + 5, "an agent that hangs is not asked each time"
    finally:
        process.process.send_signal(signal.SIGCONT)
    assert until(client.ping)
    assert patient.lookup(pages.keys).prefix == 4

    def all_back() -> bool:
        stats = patient.stats()
        return bool(stats) and (stats["leases"], stats["reservations"]) == (0, 0)

    assert until(all_back)


def test_a_stale_socket_file_answers_at_once(
    start_agent: Callable[..., Any], connect: Callable[..., Client], pages_of: Callable[..., Any]
) -> None:
    process = start_agent()
    process.kill()
    assert process.socket().is_socket()
    client = connect(process.socket(), timeout_seconds=0.3)
    assert all_miss(client, pages_of(1, 2))


def test_one_client_serves_many_threads(
    agent: Any, connect: Callable[..., Client], pages_of: Callable[..., Any]
) -> None:
    client = connect(agent.socket(), raise_errors=True)
    problems: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            pages = pages_of(seed, 8)
            out = np.zeros((8, client.page_bytes), np.uint8)
            for _ in range(10):
                client.put(pages.keys, pages.bytes)
                with client.load(pages.keys) as lease:
                    good = lease.copy_to(out)
                assert np.array_equal(out[good], pages.bytes[good])
        except (AssertionError, AgentError) as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert problems == []


def test_closing_gives_everything_back(
    agent: Any,
    connect: Callable[..., Client],
    pages_of: Callable[..., Any],
    until: Callable[..., bool],
) -> None:
    client, watcher = connect(agent.socket()), connect(agent.socket())
    pages, more = pages_of(1, 4), pages_of(2, 4)
    client.put(pages.keys, pages.bytes)
    lease, reservation = client.load(pages.keys), client.reserve(more.keys)
    assert len(reservation.offered) == 4
    assert (lease.tier != MISS).all()
    client.close()
    client.close()
    assert until(lambda: watcher.stats()["clients"] == 1)
    stats = watcher.stats()
    assert (stats["leases"], stats["reservations"], stats["pinned_pages"]) == (0, 0, 0)


def test_a_forked_child_connects_anew_and_leaves_its_parent_alone(
    agent: Any, connect: Callable[..., Client], pages_of: Callable[..., Any]
) -> None:
    client, pages, more = connect(agent.socket()), pages_of(1, 4), pages_of(2, 4)
    client.put(pages.keys, pages.bytes)
    lease = client.load(pages.keys)
    child = os.fork()
    if child == 0:
        lease.release()  # the parent's: nothing happens
        ok = client.wait_connected(10)
        found = client.lookup(pages.keys).prefix
        stored = client.put(more.keys, more.bytes).stored
        os._exit(0 if ok and found == 4 and stored == 4 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert client.stats()["leases"] == 1
    assert client.lookup(more.keys).prefix == 4
    lease.release()
    assert client.stats()["leases"] == 0


def test_a_child_forked_while_its_parent_connects_does_not_hide_the_parents_end(
    agent: Any,
    connect: Callable[..., Client],
    until: Callable[..., bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the lifeline up, and the connection not handed to anybody yet."""
    real, children = connection.map_arenas, []

    def forks(*given: Any) -> Any:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        children.append(child)
        return real(*given)

    watcher = connect(agent.socket())
    monkeypatch.setattr(connection, "map_arenas", forks)
    client = connect(agent.socket())
    monkeypatch.setattr(connection, "map_arenas", real)
    try:
        assert client.connected
        assert watcher.stats()["clients"] == 2
        mine = client._link.connection
        assert mine is not None
        client._link._held.closing.set()  # nobody connects again
        client._link._keeper.join(10)
        assert mine._lifeline is not None
        mine._lifeline.close()  # as the parent's end would, without a goodbye
        assert until(lambda: watcher.stats()["clients"] == 1)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
