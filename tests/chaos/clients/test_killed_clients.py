"""Clients that are killed in the middle of a put or a load: no slot, lease, pin or byte stays
taken."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.server.client import Client, Stored
from nursery import Nursery

MIB = 1 << 20
SLOT = 16384


def at_rest(stats: dict[str, Any], clients: int) -> bool:
    """Is nothing held by anybody, and every slot taken by a page that is there?"""
    return bool(stats) and (
        stats["clients"] == clients
        and stats["leases"] == 0
        and stats["reservations"] == 0
        and stats["pinned_pages"] == 0
        and stats["client_pins"] == 0
        and stats["pending_loads"] == 0
        and all(
            not tier["moving_pages"]
            # L2 is given back by the segment: slots of pages that are gone count until then.
            and (name == "nvme" or tier["used_bytes"] == tier["pages"] * SLOT)
            for name, tier in stats["tiers"].items()
        )
    )


def kill_clients(
    times: int,
    process: Any,
    watcher: Client,
    pages: Any,
    fresh: Any,
    folder: Path,
    until: Callable[..., bool],
) -> None:
    rng = random.Random(7)
    keys = folder / "keys"
    pages.keys.tofile(keys)
    for start in range(0, len(pages), 32):
        part = slice(start, start + 32)
        assert until(
            lambda part=part: (
                watcher.put(pages.keys[part], pages.bytes[part], depth=part.start * 16).status
                == Stored.EXISTS
            ).all()
        )
    nursery = Nursery(process.socket(), Geometry.of_page_bytes(watcher.page_bytes, 16), keys)
    caught: Counter[str] = Counter()
    try:
        for number in range(times):
            kind = rng.choice(["put", "load", "both"])
            pid = nursery.birth(kind, number)
            time.sleep(rng.random() * 0.06)
            stats = watcher.stats()
            caught["mid-put"] += bool(stats["reservations"])
            caught["mid-load"] += bool(stats["leases"])
            os.kill(pid, signal.SIGKILL)
            if number % 10 == 9:
                assert until(lambda: at_rest(watcher.stats(), clients=1)), watcher.stats()
    finally:
        nursery.close()
    assert until(lambda: at_rest(watcher.stats(), clients=1)), watcher.stats()
    print(f"\n[{times} clients killed: {dict(caught)}]")
    assert caught.total() > times // 4
    assert min(caught["mid-put"], caught["mid-load"]) >= times // 20
    assert watcher.stats()["counters"]["clients_gone"] >= times
    # What was there before is still there or a miss, and never something else.
    out = np.zeros((32, watcher.page_bytes), np.uint8)
    for start in range(0, len(pages), 32):
        with watcher.load(pages.keys[start : start + 32], deadline_milliseconds=5000) as lease:
            good = lease.copy_to(out)
        assert np.array_equal(out[good], pages.bytes[start : start + 32][good])
    # All memory is usable again: fresh pages go in, and pages fill the memory tiers as far as the
    # water marks let them.
    for start in range(0, len(fresh), 32):
        part = slice(start, start + 32)
        assert until(
            lambda part=part: (
                watcher.put(fresh.keys[part], fresh.bytes[part], depth=part.start * 16).status
                == Stored.EXISTS
            ).all()
        )
    assert until(lambda: at_rest(watcher.stats(), clients=1)), watcher.stats()
    tiers = watcher.stats()["tiers"]
    for name in ("hbm", "dram"):
        assert tiers[name]["pages"] * SLOT * 2 > tiers[name]["capacity_bytes"], tiers
    assert process.stop() == 0


@pytest.fixture
def victim_agent(
    start_agent: Callable[..., Any], connect: Callable[..., Client]
) -> tuple[Any, Client]:
    process = start_agent(l0=MIB, l1=4 * MIB, l2=32 * MIB)
    return process, connect(process.socket(), timeout_seconds=5.0)


def test_twenty_clients_killed(
    victim_agent: tuple[Any, Client],
    pages_of: Callable[..., Any],
    folder: Path,
    until: Callable[..., bool],
) -> None:
    kill_clients(20, *victim_agent, pages_of(1, 512), pages_of(2, 512), folder, until)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_hundred_clients_killed(
    victim_agent: tuple[Any, Client],
    pages_of: Callable[..., Any],
    folder: Path,
    until: Callable[..., bool],
) -> None:
    kill_clients(200, *victim_agent, pages_of(1, 512), pages_of(2, 512), folder, until)


def test_a_client_that_was_forked_and_died_is_noticed_though_its_child_lives(
    start_agent: Callable[..., Any],
    connect: Callable[..., Client],
    pages_of: Callable[..., Any],
    until: Callable[..., bool],
) -> None:
    process = start_agent()
    watcher, pages = connect(process.socket()), pages_of(1, 4)
    program = (
        "import os, sys, time, numpy as np\n"
        "from kvtier_agent.cache.geometry import Geometry\n"
        "from kvtier_agent.server.client import Client\n"
        "client = Client(sys.argv[1], Geometry.of_page_bytes(16384, 16))\n"
        "held = client.reserve(np.arange(64, dtype=np.uint8).reshape(4, 16))\n"
        "assert len(held.offered) == 4\n"
        "if os.fork() == 0:\n"
        "    os.close(1); time.sleep(30); os._exit(0)\n"
        "print('holding', flush=True); time.sleep(30)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(process.socket())],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "holding\n"
        assert watcher.stats()["reservations"] == 4
        parent.kill()
        parent.wait()
        assert until(lambda: watcher.stats()["reservations"] == 0)
        assert watcher.put(pages.keys, pages.bytes).stored == 4
    finally:
        os.killpg(parent.pid, signal.SIGKILL)


def test_a_lease_nobody_gives_back_expires(
    start_agent: Callable[..., Any],
    connect: Callable[..., Client],
    pages_of: Callable[..., Any],
    until: Callable[..., bool],
) -> None:
    process = start_agent(lease_seconds=1.0)
    client, pages, more = connect(process.socket()), pages_of(1, 4), pages_of(2, 4)
    client.put(pages.keys, pages.bytes)
    lease, reservation = client.load(pages.keys), client.reserve(more.keys)
    assert client.stats()["pinned_pages"] == 4
    assert until(
        lambda: (client.stats()["leases"], client.stats()["reservations"]) == (0, 0), seconds=10
    )
    assert client.stats()["pinned_pages"] == 0
    reservation.write_rows(memoryview(more.bytes).cast("B"))
    assert set(reservation.commit().tolist()) == {Stored.LOST}
    lease.release()
    assert client.lookup(pages.keys).prefix == 4
