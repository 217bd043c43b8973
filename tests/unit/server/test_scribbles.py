"""A client that writes where it must not: nobody else ever gets those bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from kvtier_agent.cache.results import MISS
from kvtier_agent.server.client import Client


def scribble(client: Client, keys: np.ndarray, index: int) -> None:
    """Overwrite a committed page, as a broken or hostile engine would."""
    with client.load(keys) as lease:
        lease.page(index)[100:200] ^= 0xFF


def test_a_committed_slot_overwritten_by_another_client_is_a_miss(
    agent: Any, connect: Callable[..., Client], pages_of: Callable[..., Any]
) -> None:
    first, second = connect(agent.socket()), connect(agent.socket())
    pages = pages_of(1, 4)
    first.put(pages.keys, pages.bytes)
    scribble(first, pages.keys, 2)
    out = np.zeros((4, second.page_bytes), np.uint8)
    with second.load(pages.keys) as lease:
        assert lease.copy_to(out).tolist() == [True, True, False, True]
        assert not lease.ok(2)
        assert lease.prefix == 2
    assert second.counters.bad_pages == 1
    counters = second.stats()["counters"]
    assert counters["quarantined_pages"] == 1
    hits = sum(counters[f"hits_l{layer}"] for layer in range(3))
    assert (hits, counters["misses"]) == (4 + 2, 2)  # the scribbler's own load had four
    assert second.lookup(pages.keys).tiers[2] == MISS


def test_a_page_is_stored_anew_after_it_was_found_bad(
    agent: Any, connect: Callable[..., Client], pages_of: Callable[..., Any]
) -> None:
    client, pages = connect(agent.socket()), pages_of(1, 1)
    client.put(pages.keys, pages.bytes)
    scribble(client, pages.keys, 0)
    out = np.zeros((1, client.page_bytes), np.uint8)
    with client.load(pages.keys) as lease:
        assert not lease.copy_to(out).any()
    assert client.put(pages.keys, pages.bytes).stored == 1
    with client.load(pages.keys) as lease:
        assert lease.copy_to(out).all()
    assert np.array_equal(out, pages.bytes)


def test_a_scribble_after_the_copy_was_verified_changes_nothing(
    agent: Any, connect: Callable[..., Client], pages_of: Callable[..., Any]
) -> None:
    first, second = connect(agent.socket()), connect(agent.socket())
    pages = pages_of(1, 1)
    first.put(pages.keys, pages.bytes)
    out = np.zeros((1, second.page_bytes), np.uint8)
    with second.load(pages.keys) as lease:
        assert lease.copy_to(out).all()
        scribble(first, pages.keys, 0)
        assert np.array_equal(out, pages.bytes)


def test_a_slot_scribbled_while_it_is_being_written_is_a_miss(
    agent: Any, connect: Callable[..., Client], pages_of: Callable[..., Any]
) -> None:
    client, pages = connect(agent.socket()), pages_of(1, 1)
    reservation = client.reserve(pages.keys)
    reservation.write(0, pages.bytes[0].data)
    reservation.view(0)[7] ^= 1
    reservation.commit()
    out = np.zeros((1, client.page_bytes), np.uint8)
    with client.load(pages.keys) as lease:
        assert not lease.copy_to(out).any()


def test_a_page_that_is_filled_is_vouched_for_by_its_source_and_not_by_its_slot(
    agent: Any, connect: Callable[..., Client], pages_of: Callable[..., Any]
) -> None:
    """Somebody whose reservation of the slot ran out still writes to it."""
    client, pages = connect(agent.socket()), pages_of(1, 2)
    reservation = client.reserve(pages.keys)

    def source(index: int, destination: np.ndarray) -> None:
        destination[:] = pages.bytes[index]
        reservation.view(index)[:] = 0xFF
        if index:
            reservation.view(0)[:] = 0xFF

    reservation.fill(source)
    reservation.commit()
    out = np.zeros((2, client.page_bytes), np.uint8)
    with client.load(pages.keys) as lease:
        assert lease.copy_to(out).tolist() == [False, True]
    assert np.array_equal(out[1], pages.bytes[1])


def test_an_arena_cut_short_by_a_client_is_in_the_metrics(
    agent: Any,
    connect: Callable[..., Client],
    pages_of: Callable[..., Any],
    get: Callable[..., Any],
    until: Callable[..., bool],
) -> None:
    """At its end, where no page lies: without the extension a touched page would end the agent."""
    client, pages = connect(agent.socket()), pages_of(1, 1)
    client.put(pages.keys, pages.bytes)
    (domain,) = agent.loop.snapshot.domains.values()
    port = agent.http.address[1]
    name = f'kv_arena_cut_bytes{{domain="{domain.name}",layer="1"}}'
    assert f"{name} 0.0" in get(port, "/metrics")[1]
    arena = agent.core.l1
    os.truncate(arena.path, arena.size_bytes - 4096)
    assert until(lambda: f"{name} 4096.0" in get(port, "/metrics")[1])
    out = np.zeros((1, client.page_bytes), np.uint8)
    with client.load(pages.keys) as lease:
        assert lease.copy_to(out).all()
    assert np.array_equal(out, pages.bytes)
