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


def test_a_readiness_probe_never_changes_the_model(make_agent: Make, connect: Make) -> None:
    agent = make_agent(server={"geometry_grace_seconds": 0.0})
    connect(agent.socket(), SMALL).close()
    probe = connect(agent.socket(), LARGE, probe=True)
    assert not probe.connected
    assert agent.call(lambda: agent.core.cache.geometry) == SMALL


READY = "default: ready, a page was stored, loaded and verified\n"
