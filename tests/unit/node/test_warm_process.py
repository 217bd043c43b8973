"""An agent that is killed or stopped and started again finds its DRAM tier, through the client."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_process import AgentProcess
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.identity import chain_keys
from kvtier_agent.cache.results import MISS
from kvtier_agent.node.places import arena_folder
from kvtier_agent.server.client import Client, Stored

GEOMETRY = Geometry.of_page_bytes(64 * 1024, 256)
SIZE = GEOMETRY.page_bytes
COUNT = 200
POLICY = """
apiVersion: kvtier.io/v1alpha1
kind: KVTierPolicy
metadata: {name: warm}
spec:
  tiers: {hbm: {size: 4Mi}, dram: {size: 64Mi}}
  valueDensity: {model: classic}
"""


class Place(AgentProcess):
    """The agent of an engine that has its L0 itself; and where its memory lies."""

    def __init__(self, root: Path, *options: str) -> None:
        super().__init__(root, "--l0", "engine", *options, policy=POLICY)
        self.arenas = arena_folder(Path("/dev/shm"), self.short)
        self.l1 = self.arenas / "default.l1"
        self.table = self.arenas / "default.table"

    def again(self, number: signal.Signals, meanwhile: Callable[[], object] = bool) -> None:
        assert self.stop(number) == (0 if number is signal.SIGTERM else -number)
        meanwhile()
        self.start().ready()

    def inspect(self) -> dict[str, Any]:
        found = subprocess.run(
            [
                *(sys.executable, "-m", "kvtier_cli.main", "inspect"),
                *("--run-dir", str(self.short), "--json", "-"),
            ],
            capture_output=True,
            check=True,
        )
        domain: dict[str, Any] = json.loads(found.stdout)["domains"]["default"]
        return domain

    def said(self) -> str:
        self.until(lambda: self.condition("Ready")[0] == "True", "the agent is ready")
        return self.condition("Ready")[2]


class Engine:
    """A client that stays over restarts, and a chain of pages with known bytes."""

    def __init__(self, place: Place, name: str = "engine", seed: int = 1) -> None:
        self.place = place
        self.client = Client(place.socket, GEOMETRY, timeout_seconds=10.0, name=name)
        assert self.client.wait_connected(30.0)
        tokens = np.arange(COUNT * 256, dtype=np.uint32) + np.uint32(seed << 20)
        self.keys = chain_keys(self.client.root, tokens, 256)
        self.bytes = np.random.default_rng(seed).integers(0, 256, (COUNT, SIZE), dtype=np.uint8)

    def put(self, count: int = COUNT) -> None:
        result = self.client.put(self.keys[:count], self.bytes[:count])
        assert (result.status == Stored.STORED).all()

    def back(self, boot: int) -> None:
        """Wait until the client has found the agent that came after `boot`."""
        self.place.until(lambda: self.client.boot not in (0, boot), "the client is back")

    def right(self) -> int:
        """How many pages come back, one by one, each with its own bytes."""
        held = 0
        copy = np.zeros((1, SIZE), np.uint8)
        for i in range(COUNT):
            with self.client.load(self.keys[i : i + 1], deadline_milliseconds=5000) as lease:
                good = lease.copy_to(copy)
            if good[0]:
                assert np.array_equal(copy[0], self.bytes[i]), "a wrong byte was served"
                held += 1
        return held


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with Place(tmp_path) as running:
        running.ready()
        yield running


@pytest.fixture(params=[signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
def way(request: pytest.FixtureRequest) -> signal.Signals:
    number: signal.Signals = request.param
    return number


def test_an_engine_finds_its_pages_again(place: Place, way: signal.Signals) -> None:
    engine = Engine(place)
    engine.put()
    boot = engine.client.boot
    for _ in range(2):
        place.again(way)
        engine.back(boot)
        boot = engine.client.boot
        assert engine.right() == COUNT
    assert engine.client.counters.bad_pages == 0
    expected = f"{COUNT} pages of the dram tier were taken over, none dropped"
    assert expected in place.said()
    shown = place.inspect()
    assert shown["restart"] == {"taken_over": COUNT, "dropped": {}, "cold": ""}
    assert shown["tiers"]["dram"]["pages"] == COUNT
    assert f'kv_taken_over_pages_total{{domain="default"}} {COUNT}.0' in place.get("/metrics")[1]
    place.until(
        lambda: (
            f'kv_scrubbed_pages_total{{domain="default"}} {COUNT}.0' in place.get("/metrics")[1]
        ),
        "the scrub has read all",
    )
    assert place.get("/healthz") == (200, "ok\n")
    assert place.get("/readyz")[0] == 200
    engine.client.close()


def test_pages_are_there_before_any_engine_is(place: Place, way: signal.Signals) -> None:
    engine = Engine(place)
    engine.put()
    engine.client.close()
    place.again(way)
    assert place.inspect()["tiers"]["dram"]["pages"] == COUNT
    place.again(way)
    engine = Engine(place)
    assert engine.right() == COUNT
    engine.client.close()


def test_the_tier_is_not_clamped_by_its_own_pages(tmp_path: Path, way: signal.Signals) -> None:
    with Place(tmp_path) as place:
        place.ready()
        engine = Engine(place)
        engine.put()
        held = place.l1.stat().st_blocks * 512
        place.again(way)
        place.said()
        assert place.condition("Clamped")[0] == "False"

        def dram() -> int:
            return sum(t["capacityBytes"] for t in place.status()["tiers"] if t["name"] == "dram")

        place.until(lambda: dram() == 64 << 20, "the tier is shown, whole")
        assert place.l1.stat().st_blocks * 512 == held, "the same memory, not as much again"
        engine.client.close()


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 16]))


def test_a_flipped_byte_is_a_miss(place: Place, way: signal.Signals) -> None:
    engine = Engine(place)
    engine.put()
    boot = engine.client.boot
    place.again(way, lambda: flip(place.l1, 77 * SIZE + 5))
    engine.back(boot)
    assert engine.right() == COUNT - 1
    place.until(
        lambda: 'kv_quarantined_pages_total{domain="default"} 1.0' in place.get("/metrics")[1],
        "it was counted, by its reader or by the scrub",
    )
    engine.client.close()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda p: os.truncate(p.l1, 20 * SIZE), "it has 1310720 bytes"),
        (lambda p: os.truncate(p.table, 9000), "is cut short"),
        (lambda p: flip(p.table, 8), "layout"),  # the low byte of the layout's version
        (lambda p: p.table.write_bytes(p.table.read_bytes()[:8192] + bytes(1 << 20)), "cut short"),
    ],
    ids=["arena", "table", "layout", "records"],
)
def test_what_cannot_be_believed_is_a_cold_start(
    place: Place, spoil: Callable[[Place], object], reason: str
) -> None:
    engine = Engine(place)
    engine.put()
    boot = engine.client.boot
    place.again(signal.SIGKILL, lambda: spoil(place))
    engine.back(boot)
    assert engine.right() == 0
    engine.put()
    assert engine.right() == COUNT
    assert "the dram tier started cold: " in place.said()
    assert reason in place.said()
    assert reason in place.inspect()["restart"]["cold"]
    engine.client.close()


def test_a_client_of_the_boot_before_cannot_have_its_bytes_served(
    place: Place, way: signal.Signals
) -> None:
    """It kept its mapping and a reservation, and writes when the slots belong to others."""
    old = Engine(place, "old")
    old.put(100)
    reservation = old.client.reserve(old.keys[100:])
    assert (reservation.status == Stored.STORED).all(), "offered"
    mapped = old.client._link.connection.arenas[1]  # type: ignore[union-attr]
    offsets = reservation._offset.tolist()[100 - COUNT :]
    boot = old.client.boot
    place.again(way)

    new = Engine(place, "new", seed=2)
    assert new.client.put(new.keys[:150], new.bytes[:150]).stored == 150
    for offset in offsets:  # what it was granted by a process that is gone
        mapped.view(offset, SIZE)[:] = old.bytes[100]
    sums = np.zeros(len(reservation), np.uint64)
    assert (reservation.commit(sums) != Stored.STORED).all()
    old.back(boot)
    copy = np.zeros((1, SIZE), np.uint8)
    wrong = 0
    for i in range(150):
        with new.client.load(new.keys[i : i + 1], deadline_milliseconds=5000) as lease:
            there, good = int(lease.tier[0]) != MISS, bool(lease.copy_to(copy)[0])
        wrong += there and not good
        assert not good or np.array_equal(copy[0], new.bytes[i])
    assert wrong > 0, "the slots did belong to others, and none of those bytes was served"
    assert old.right() == 100
    old.client.close()
    new.client.close()


def test_the_first_engine_of_another_model_does_not_take_what_was_left(
    place: Place, way: signal.Signals
) -> None:
    engine = Engine(place)
    engine.put()
    boot = engine.client.boot
    place.again(way)
    other = Geometry.of_page_bytes(2 * SIZE, 256, weights="another")
    with Client(place.socket, other, timeout_seconds=10.0) as client:
        place.until(lambda: client.counters.refusals > 0, "it is refused")
        assert "use another trust domain" in client.counters.last_error
        engine.back(boot)
        assert engine.right() == COUNT
        assert not client.connected
    engine.client.close()


def test_memory_is_given_back_where_it_is_asked_for(tmp_path: Path) -> None:
    with Place(tmp_path, "--memory-on-stop", "free") as place:
        place.ready()
        engine = Engine(place)
        engine.put()
        engine.client.close()
        assert place.stop() == 0
        assert not place.arenas.exists()


def test_where_it_stays_the_log_says_so(place: Place) -> None:
    engine = Engine(place)
    engine.put()
    engine.client.close()
    assert place.stop() == 0
    kept = next(x for x in place.lines() if x["event"] == "pages stay in memory for the next agent")
    assert kept["bytes"] >= COUNT * SIZE
    assert kept["folder"] == str(place.arenas)
