"""One storm: an agent whose drive is throttled, writers at a multiple of that, and a watcher that
looks up all the while and reads the metrics."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import small_agent
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.server.client import Client
from prometheus_client.parser import text_string_to_metric_families

from storm import writer

MIB = 1 << 20
KEYS = 256
"""Of a lookup."""
LOOK_EVERY_SECONDS = 0.01
SCRAPE_EVERY_SECONDS = 1.0
REST_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Weather:
    """`drive`: bytes a second of the drive; `times`: what writers send, as a multiple of it."""

    drive: float = 200e6
    times: float = 4.0
    seconds: float = 60.0
    page_bytes: int = MIB
    writers: int = 2
    l0: int = 128 * MIB
    l1: int = 512 * MIB
    l2: int = 4096 * MIB


@dataclass(slots=True)
class Storm:
    """What was seen. `idle`, `during`: seconds of each lookup. `evictions`: kv_evictions_total by
    layer at each scrape, one a second. `over`: scrapes with DRAM above its limit, as used/limit."""

    idle: list[float] = field(default_factory=list)
    during: list[float] = field(default_factory=list)
    evictions: list[dict[str, float]] = field(default_factory=list)
    dram: list[float] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    pages: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def p99s(self) -> tuple[float, float]:
        """Of lookups, idle and during the storm, seconds."""
        return tuple(float(np.percentile(x, 99)) for x in (self.idle, self.during))  # type: ignore[return-value]

    @property
    def written_bytes(self) -> int:
        return self.counters["stored_bytes_l2"]

    @property
    def evicted(self) -> int:
        return sum(self.counters[f"evicted_l{tier}"] for tier in range(3))


def storm(folder: Path, weather: Weather) -> Storm:
    """`folder`: on the file system of the volume, with a short name."""
    seen = Storm()
    with ExitStack() as stack:
        agent, port = _agent(stack, folder, weather)
        socket = folder / "run" / "default.sock"
        geometry = Geometry.of_page_bytes(weather.page_bytes, 16)
        client = stack.enter_context(
            Client(socket, geometry, timeout_seconds=10.0, name="watcher", raise_errors=True)
        )
        assert client.wait_connected(60.0)
        keys = np.random.default_rng(0).integers(0, 256, (KEYS, 16), dtype=np.uint8)
        page = np.zeros(weather.page_bytes, np.uint8)
        client.put(
            keys[: min(KEYS, weather.l0 // weather.page_bytes // 2)], lambda i, to: _fill(to, page)
        )
        _watch(client, keys, port, seen, seen.idle, min(10.0, weather.seconds / 3))
        with ExitStack() as writers:
            for seed in range(weather.writers):
                _writer(writers, socket, weather, seed + 1)
            begin = client.stats()["counters"]
            _watch(client, keys, port, seen, seen.during, weather.seconds)
            seen.counters = client.stats()["counters"]
            sent = seen.counters["offered"] - begin["offered"]
            if sent * weather.page_bytes < weather.drive * weather.seconds:
                seen.problems.append(f"writers got rid of {sent} pages only: that was no storm")
        stats = _at_rest(client)
        seen.counters, seen.pages = stats["counters"], stats["pages"]
        agent.terminate()
        if agent.wait(60):
            seen.problems.append("the agent did not stop in good order")
    missing = seen.counters["committed"] - seen.pages - seen.evicted
    if missing:
        seen.problems.append(f"{missing} pages went away and no eviction counts them")
    if max(seen.dram) > 1:
        seen.problems.append(f"DRAM was at {max(seen.dram):.1%} of its limit")
    return seen


def _fill(to: Any, page: np.ndarray) -> None:
    to[:] = page


def _agent(stack: ExitStack, folder: Path, weather: Weather) -> tuple[Any, int]:
    given = {
        "folder": str(folder), "l0": weather.l0, "l1": weather.l1, "l2": weather.l2,
        "throttle": weather.drive,
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, small_agent.__file__, json.dumps(given)], stdout=subprocess.PIPE, text=True
    )
    stack.callback(small_agent.sweep, folder)
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdout is not None
    return process, int(json.loads(process.stdout.readline())["port"])


def _writer(stack: ExitStack, socket: Path, weather: Weather, seed: int) -> None:
    pace = weather.drive * weather.times / weather.writers
    process = subprocess.Popen(
        [
            *(sys.executable, str(writer.__file__), str(socket)),
            *(str(weather.page_bytes), str(pace), str(seed)),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdout is not None
    assert process.stdout.readline(), "a writer did not start"


def _watch(
    client: Client, keys: np.ndarray, port: int, seen: Storm, times: list[float], seconds: float
) -> None:
    begin = time.monotonic()
    next_scrape = begin
    while (now := time.monotonic()) < begin + seconds:
        start = time.perf_counter()
        client.lookup(keys)
        times.append(time.perf_counter() - start)
        if now >= next_scrape:
            next_scrape += SCRAPE_EVERY_SECONDS
            _scrape(port, seen)
        time.sleep(LOOK_EVERY_SECONDS)


def _scrape(port: int, seen: Storm) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "layer" in sample.labels:
                found[sample.name, sample.labels["layer"]] = sample.value
    seen.evictions.append({n: found["kv_evictions_total", n] for n in ("0", "1", "2")})
    used, limit = (found[f"kv_tier_{what}_bytes", "1"] for what in ("used", "capacity"))
    if limit:  # the first snapshot may be of a time before the first engine
        seen.dram.append(used / limit)


def _at_rest(client: Client) -> dict[str, Any]:
    end = time.monotonic() + REST_SECONDS
    while True:
        stats = client.stats()
        moving = sum(tier["moving_pages"] for tier in stats["tiers"].values())
        if not moving and not stats["reservations"]:
            return stats
        if time.monotonic() > end:
            raise AssertionError(f"{moving} pages never arrive")
        time.sleep(0.1)
