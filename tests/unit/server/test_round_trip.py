"""Pages go in and come out byte for byte, through every tier, and hits are counted honestly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from kvtier_agent.cache.results import MISS
from kvtier_agent.server.client import Client, Stored

MIB = 1 << 20


def read_all(client: Client, pages: Any, group: int = 32) -> np.ndarray:
    """Load and compare a chain in groups; the tier of each page that came back right."""
    tiers = np.full(len(pages), MISS, np.uint8)
    out = np.zeros((group, client.page_bytes), np.uint8)
    for start in range(0, len(pages), group):
        keys = pages.keys[start : start + group]
        with client.load(keys, deadline_milliseconds=5000) as lease:
            good = lease.copy_to(out)
            for i in np.flatnonzero(good):
                assert np.array_equal(out[i], pages.bytes[start + i])
                tiers[start + i] = lease.tier[i]
    return tiers


def test_what_was_put_is_found_loaded_and_equal(
    agent: Any, connect: Callable[..., Client], pages_of: Callable[..., Any]
) -> None:
    client, pages = connect(agent.socket()), pages_of(1, 20)
    assert client.lookup(pages.keys).prefix == 0
    assert client.put(pages.keys, pages.bytes).status.tolist() == [Stored.STORED] * 20
    found = client.lookup(pages.keys, total_tokens=20 * 16)
    assert found.prefix == 20
    assert found.load == 20
    assert set(found.tiers.tolist()) <= {0, 1}
    assert (read_all(client, pages) != MISS).all()


def test_between_processes(
    start_agent: Callable[..., Any], connect: Callable[..., Client], pages_of: Callable[..., Any]
) -> None:
    process = start_agent()
    writer, reader, pages = connect(process.socket()), connect(process.socket()), pages_of(1, 20)
    assert writer.put(pages.keys, pages.bytes).stored == 20
    assert (read_all(reader, pages) != MISS).all()
    assert process.stop() == 0


def test_pages_come_back_from_all_three_tiers(
    make_agent: Callable[..., Any],
    connect: Callable[..., Client],
    pages_of: Callable[..., Any],
    until: Callable[..., bool],
) -> None:
    agent = make_agent(l0=MIB, l1=2 * MIB, l2=64 * MIB)
    client, pages = connect(agent.socket()), pages_of(1, 512)
    for start in range(0, 512, 32):
        part = slice(start, start + 32)
        assert until(
            lambda part=part: (
                client.put(pages.keys[part], pages.bytes[part], depth=part.start * 16).status
                == Stored.EXISTS
            ).all()
        )
    assert until(lambda: client.stats()["tiers"]["nvme"]["pages"] > 200)
    # Reads from NVMe make room in a small DRAM: a page may be dropped by it, what comes is right.
    tiers = read_all(client, pages, group=8)
    assert {0, 1, 2, MISS} >= set(tiers.tolist())
    assert (tiers == 2).sum() > 100
    stats = client.stats()
    assert stats["latency"]["l0->l1"]["count"] > 0
    assert stats["latency"]["l1->l2"]["p99"] >= stats["latency"]["l1->l2"]["p50"] > 0
    assert stats["latency"]["l2->l1"]["bytes"] >= 100 * 16384


def test_what_is_there_is_not_stored_again(
    agent: Any, connect: Callable[..., Client], pages_of: Callable[..., Any]
) -> None:
    client, pages = connect(agent.socket()), pages_of(1, 4)
    client.put(pages.keys[:2], pages.bytes[:2])
    asked: list[int] = []

    def fill(i: int, destination: np.ndarray) -> None:
        asked.append(i)
        destination[:] = pages.bytes[i]

    status = client.put(pages.keys, fill).status.tolist()
    assert status == [Stored.EXISTS, Stored.EXISTS, Stored.STORED, Stored.STORED]
    assert asked == [2, 3]
    assert (read_all(client, pages) != MISS).all()


def test_tensors_are_taken_and_filled(
    agent: Any, connect: Callable[..., Client], pages_of: Callable[..., Any]
) -> None:
    client, pages = connect(agent.socket()), pages_of(1, 4)
    assert client.put(pages.keys, torch.from_numpy(pages.bytes)).stored == 4
    out = torch.zeros((4, client.page_bytes), dtype=torch.uint8)
    with client.load(pages.keys) as lease:
        assert lease.copy_to(out).all()
    assert np.array_equal(out.numpy(), pages.bytes)


def test_rows_say_where_pages_go(
    agent: Any, connect: Callable[..., Client], pages_of: Callable[..., Any]
) -> None:
    client, pages = connect(agent.socket()), pages_of(1, 3)
    client.put(pages.keys, pages.bytes)
    out = np.zeros((10, client.page_bytes), np.uint8)
    with client.load(pages.keys) as lease:
        assert lease.copy_to(out, rows=[9, 0, 5]).all()
    for page, row in enumerate([9, 0, 5]):
        assert np.array_equal(out[row], pages.bytes[page])
    assert not out[1].any()


def test_an_engine_may_copy_by_itself(
    agent: Any, connect: Callable[..., Client], pages_of: Callable[..., Any]
) -> None:
    client, pages = connect(agent.socket()), pages_of(1, 2)
    reservation = client.reserve(pages.keys)
    for i in reservation.offered:
        reservation.view(i)[:] = pages.bytes[i]
    from kvtier_agent.server.mapping import checksum

    sums = np.array([checksum(page.data) for page in pages.bytes], np.uint64)
    assert reservation.commit(sums).tolist() == [Stored.STORED] * 2
    with client.load(pages.keys) as lease:
        copy = lease.page(1).copy()
        assert lease.verify(1, copy.data)
        copy[5] ^= 1
        assert not lease.verify(1, copy.data)
        assert not lease.ok(1)
        assert lease.prefix == 1


def test_an_aborted_put_leaves_nothing(
    agent: Any, connect: Callable[..., Client], pages_of: Callable[..., Any]
) -> None:
    client, pages = connect(agent.socket()), pages_of(1, 8)
    reservation = client.reserve(pages.keys)
    assert client.stats()["reservations"] == 8
    reservation.abort()
    assert client.stats()["reservations"] == 0
    assert client.lookup(pages.keys).prefix == 0
    assert reservation.commit().tolist() != [Stored.STORED] * 8


def test_a_source_that_raises_gives_the_slots_back(
    agent: Any, connect: Callable[..., Client], pages_of: Callable[..., Any]
) -> None:
    client, pages = connect(agent.socket()), pages_of(1, 8)

    def broken(i: int, destination: np.ndarray) -> None:
        if i == 3:
            raise RuntimeError("the engine lost the page")

    with pytest.raises(RuntimeError, match="lost the page"):
        client.put(pages.keys, broken)
    assert client.stats()["reservations"] == 0
    assert client.lookup(pages.keys).prefix == 0


def test_a_mistake_in_shapes_is_said_before_anything_is_asked(
    agent: Any, connect: Callable[..., Client], pages_of: Callable[..., Any]
) -> None:
    client, pages = connect(agent.socket()), pages_of(1, 3)
    with pytest.raises(ValueError, match=r"\(3, 16384\) uint8 belong"):
        client.put(pages.keys, pages.bytes[:2])
    with pytest.raises(ValueError, match="no multiple of 16"):
        client.lookup(bytes(17))
    with client.load(pages.keys) as lease, pytest.raises(ValueError, match="out has shape"):
        lease.copy_to(np.zeros((3, 5), np.uint8))
    assert client.stats()["reservations"] == 0


def test_no_pages_at_all_are_no_mistake(
    agent: Any, connect: Callable[..., Client], pages_of: Callable[..., Any]
) -> None:
    """An engine whose prompt is not cached, or cached whole, goes the same way as all others."""
    client, none = connect(agent.socket()), pages_of(1, 3)
    keys, out = none.keys[:0], np.zeros((0, client.page_bytes), np.uint8)
    assert client.lookup(keys).load == 0
    with client.load(keys) as lease:
        assert lease.copy_to(out).tolist() == []
        assert lease.prefix == 0
    for source in (none.bytes[:0], torch.zeros((0, client.page_bytes), dtype=torch.uint8)):
        assert client.put(keys, source).stored == 0


def test_a_chain_longer_than_a_call_may_name_is_served_in_part(
    make_agent: Callable[..., Any], connect: Callable[..., Client], pages_of: Callable[..., Any]
) -> None:
    agent = make_agent(server={"max_keys": 8})
    client, pages = connect(agent.socket()), pages_of(1, 12)
    assert client.put(pages.keys, pages.bytes).stored == 8
    assert client.lookup(pages.keys).prefix == 8
    with client.load(pages.keys) as lease:
        assert (lease.tier != MISS).tolist() == [True] * 8 + [False] * 4


def test_hits_and_misses_are_what_was_asked(
    agent: Any,
    connect: Callable[..., Client],
    pages_of: Callable[..., Any],
    get: Callable[..., Any],
    until: Callable[..., bool],
) -> None:
    client, pages = connect(agent.socket()), pages_of(1, 10)
    found = client.lookup(pages.keys, total_tokens=9 * 16 + 3)
    assert found.load == 0
    client.put(pages.keys[:6], pages.bytes[:6])
    found = client.lookup(pages.keys, total_tokens=9 * 16 + 3)
    out = np.zeros((10, client.page_bytes), np.uint8)
    with client.load(pages.keys[: found.load]) as lease:
        assert lease.copy_to(out).all()
    counters = client.stats()["counters"]
    hits = sum(counters[f"hits_l{layer}"] for layer in range(3))
    assert (hits, counters["misses"]) == (6, 14)
    assert counters["hit_tokens"] == 6 * 16
    assert counters["hit_tokens"] + counters["miss_tokens"] == 2 * (9 * 16 + 3)
    assert until(
        lambda: 'kv_cache_hit_total{layer="miss"} 14.0' in get(agent.http.address[1], "/metrics")[1]
    )


def test_without_a_policy_in_force_nothing_is_admitted(
    make_agent: Callable[..., Any], connect: Callable[..., Client], pages_of: Callable[..., Any]
) -> None:
    agent = make_agent(admitting=False)
    client, pages = connect(agent.socket()), pages_of(1, 2)
    assert client.put(pages.keys, pages.bytes).status.tolist() == [Stored.REFUSED_CLOSED] * 2
