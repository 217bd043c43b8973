"""A trust domain changes its model: the engines of one leave, those of another come."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.snapshot import check_books
from kvtier_agent.server import protocol as p
from kvtier_agent.server.client import Client

SMALL = Geometry.of_page_bytes(16384, 16)
LARGE = Geometry.of_page_bytes(3 * 16384, 32, weights="another")
Until = Callable[..., bool]
Make = Callable[..., Any]


def fill(client: Client, count: int, seed: int, page_bytes: int) -> int:
    """Store chains of 8 pages and read them back; how many pages came back with their bytes."""
    rng = np.random.default_rng(seed)
    right = 0
    for _ in range(count // 8):
        keys = rng.integers(0, 256, (8, 16), dtype=np.uint8)
        pages = rng.integers(0, 256, (8, page_bytes), dtype=np.uint8)
        client.put(keys, pages)
        copy = np.zeros_like(pages)
        with client.load(keys, deadline_milliseconds=2000) as lease:
            good = lease.copy_to(copy)
        assert (copy[good] == pages[good]).all()
        right += int(good.sum())
    return right


def refusal(socket: Path, connect: Make) -> str:
    client = connect(socket, LARGE)
    assert not client.connected
    assert set(client.counters.by_code) == {p.Code.GEOMETRY}
    said = str(client.counters.last_error)
    client.close()
    return said


def test_another_model_gets_the_domain_once_the_engines_of_the_first_have_left(
    make_agent: Make, connect: Make, until: Until, get: Any
) -> None:
    agent = make_agent(server={"geometry_grace_seconds": 0.2})
    port = agent.http.address[1]
    first = connect(agent.socket(), SMALL)
    assert fill(first, 1200, 1, SMALL.page_bytes) > 0
    assert get(port, "/readyz")[0] == 200  # a probe of the first geometry is connected now
    counted = agent.call(lambda: agent.core.cache.counters.as_dict())
    assert "use another trust domain" in refusal(agent.socket(), connect)
    first.close()

    second = connect(agent.socket(), LARGE)
    assert until(lambda: second.connected), second.counters.last_error
    assert agent.call(lambda: agent.core.cache.geometry) == LARGE
    assert fill(second, 600, 2, LARGE.page_bytes) > 0
    assert until(lambda: get(port, "/readyz") == (200, READY)), get(port, "/readyz")
    again = agent.call(lambda: agent.core.cache.counters.as_dict())
    assert all(again[name] >= counted[name] for name in counted), "counters never go back"
    assert until(lambda: agent.call(lambda: agent.core.cache.traffic.in_flight) == 0)
    agent.call(lambda: check_books(agent.core.cache))
    second.close()

    back = connect(agent.socket(), SMALL)
    assert until(lambda: back.connected), back.counters.last_error
    assert fill(back, 600, 3, SMALL.page_bytes) > 0
    tiers = agent.call(lambda: agent.core.cache.snapshot(time.monotonic()).tiers)
    for tier, budget in zip(tiers, (2 << 20, 8 << 20, 64 << 20), strict=True):
        assert tier.used_bytes <= tier.capacity_bytes <= budget
    held = [agent.core._l0.backed_bytes, agent.core._l1.backed_bytes]
    assert held[0] <= 2 << 20
    assert held[1] <= 8 << 20


def test_an_engine_that_comes_back_soon_finds_its_pages(
    make_agent: Make, connect: Make, until: Until
) -> None:
    agent = make_agent(server={"geometry_grace_seconds": 60.0})
    first = connect(agent.socket(), SMALL)
    keys = np.arange(16, dtype=np.uint8).reshape(1, 16)
    page = np.full((1, SMALL.page_bytes), 7, np.uint8)
    assert first.put(keys, page).stored == 1
    first.close()
    assert until(lambda: not agent.call(lambda: list(agent.loop._channels["default"].sessions)))
    assert "its engines have left" in refusal(agent.socket(), connect)
    again = connect(agent.socket(), SMALL)
    assert until(lambda: again.connected)
    assert again.lookup(keys).prefix == 1


def left_on_nvme(start_agent: Make, connect: Make, until: Until) -> tuple[np.ndarray, Path]:
    """An agent has stored pages, some of them on NVMe, and was killed. Their keys, its socket."""
    process = start_agent()
    client = connect(process.socket(), SMALL)
    assert until(lambda: client.connected)
    rng = np.random.default_rng(9)
    chains = rng.integers(0, 256, (150, 8, 16), dtype=np.uint8)  # twice what memory holds
    for keys in chains:
        client.put(keys, rng.integers(0, 256, (8, SMALL.page_bytes), dtype=np.uint8))
        with client.load(keys, deadline_milliseconds=2000):
            pass
    on_nvme = [keys[0] for keys in chains if client.lookup(keys).tiers[0] == 2]
    assert on_nvme
    client.close()
    process.kill()
    return np.array(on_nvme), process.socket()


def found(client: Client, keys: np.ndarray) -> int:
    return sum(int(client.lookup(key.reshape(1, 16)).prefix) for key in keys)


def test_pages_on_nvme_wait_for_their_engines_after_a_restart(
    start_agent: Make, connect: Make, until: Until
) -> None:
    keys, socket = left_on_nvme(start_agent, connect, until)
    process = start_agent()
    said = refusal(socket, connect)
    assert "the volumes hold pages of another model or layout (16384 bytes, 16 tokens" in said
    assert "or wait " in said
    probe = connect(socket, LARGE, probe=True)
    assert not probe.connected
    first = connect(socket, SMALL)
    assert until(lambda: first.connected)
    assert found(first, keys) > 0, "nothing was removed meanwhile"
    assert "use another trust domain" in refusal(socket, connect)
    assert process.stop() == 0


def test_nobody_waits_for_engines_that_do_not_come_back(
    start_agent: Make, connect: Make, until: Until
) -> None:
    keys, socket = left_on_nvme(start_agent, connect, until)
    process = start_agent(server={"geometry_grace_seconds": 0.5})
    second = connect(socket, LARGE)
    assert until(lambda: second.connected), second.counters.last_error
    assert fill(second, 200, 2, LARGE.page_bytes) > 0
    second.close()
    first = connect(socket, SMALL)
    assert until(lambda: first.connected), first.counters.last_error
    assert found(first, keys) == 0
    assert process.stop() == 0


def test_pages_in_memory_wait_for_their_engines_after_a_restart(
    make_agent: Make, connect: Make, until: Until
) -> None:
    agent = make_agent(l2=0)
    client = connect(agent.socket(), SMALL)
    assert fill(client, 400, 1, SMALL.page_bytes) > 128, "more than L0 holds"
    client.close()
    agent.close()
    again = make_agent(l2=0)
    assert again.core.memory.restart.taken_over > 0
    assert "its engines have left" in refusal(again.socket(), connect)
    assert again.call(lambda: again.core.cache.geometry) == SMALL
    again.close()
    last = make_agent(l2=0, server={"geometry_grace_seconds": 0.0})
    assert last.core.memory.restart.taken_over > 0
    second = connect(last.socket(), LARGE)
    assert until(lambda: second.connected), second.counters.last_error
    assert fill(second, 64, 2, LARGE.page_bytes) == 64


def test_a_readiness_probe_never_changes_the_model(make_agent: Make, connect: Make) -> None:
    agent = make_agent(server={"geometry_grace_seconds": 0.0})
    connect(agent.socket(), SMALL).close()
    probe = connect(agent.socket(), LARGE, probe=True)
    assert not probe.connected
    assert agent.call(lambda: agent.core.cache.geometry) == SMALL


READY = "default: ready, a page was stored, loaded and verified\n"
