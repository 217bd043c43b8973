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
LEAST_TIMES = 3.5
"""What the drive takes that the writers have to get rid of, where they were asked for more."""
NO_STORM = "that was no storm"
MOST_OWN_BYTES = 64 * MIB
"""By which the agent's own memory may grow in a storm, beside its tiers."""


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
    layer at each scrape, one a second. Each scrape as well: `dram`, the memory behind the arena of
    L1 as a part of the tier's size, by what the kernel says of the file; `own`, bytes of memory
    that belong to the agent's process alone. `times`: what was sent, in drives."""

    idle: list[float] = field(default_factory=list)
    during: list[float] = field(default_factory=list)
    evictions: list[dict[str, float]] = field(default_factory=list)
    dram: list[float] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    times: float = 0.0
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
        watched = _Watched(port, agent.pid, folder, weather)
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
        _watch(client, keys, watched, seen, seen.idle, min(10.0, weather.seconds / 3))
        calm = len(seen.own)
        with ExitStack() as writers:
            for seed in range(weather.writers):
                _writer(writers, socket, weather, seed + 1)
            begin = client.stats()["counters"]
            since = time.monotonic()
            _watch(client, keys, watched, seen, seen.during, weather.seconds)
            seconds = time.monotonic() - since
            seen.counters = client.stats()["counters"]
            sent = seen.counters["offered"] - begin["offered"]
            seen.times = sent * weather.page_bytes / weather.drive / seconds
            if seen.times < min(LEAST_TIMES, 0.9 * weather.times):
                seen.problems.append(
                    f"writers got rid of {seen.times:.2f} times what the drive takes, not of"
                    f" {weather.times:g}: {NO_STORM}"
                )
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
    grown = max(seen.own[calm:]) - max(seen.own[:calm])
    if grown > MOST_OWN_BYTES:
        seen.problems.append(f"the agent itself took {grown / MIB:.0f} MiB more than when idle")
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


@dataclass(frozen=True, slots=True)
class _Watched:
    """The agent: its HTTP port, its process, where its folder is."""

    port: int
    pid: int
    folder: Path
    weather: Weather

    def dram(self) -> float:
        """Of the tier's size, what lies behind the arena."""
        name = f"kvtier-test-{self.pid}-{self.folder.name}-default"
        blocks = (small_agent.SHM / name / "default.l1").stat().st_blocks
        return blocks * 512 / self.weather.l1

    def own(self) -> int:
        """Bytes of anonymous memory: no arena, no table, no file."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("the kernel does not say RssAnon")


def _watch(
    client: Client,
    keys: np.ndarray,
    watched: _Watched,
    seen: Storm,
    times: list[float],
    seconds: float,
) -> None:
    begin = time.monotonic()
    next_scrape = begin
    while (now := time.monotonic()) < begin + seconds:
        start = time.perf_counter()
        client.lookup(keys)
        times.append(time.perf_counter() - start)
        if now >= next_scrape:
            next_scrape += SCRAPE_EVERY_SECONDS
            _scrape(watched, seen)
        time.sleep(LOOK_EVERY_SECONDS)


def _scrape(watched: _Watched, seen: Storm) -> None:
    seen.dram.append(watched.dram())
    seen.own.append(watched.own())
    with urllib.request.urlopen(f"http://127.0.0.1:{watched.port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "layer" in sample.labels:
                found[sample.name, sample.labels["layer"]] = sample.value
    seen.evictions.append({n: found["kv_evictions_total", n] for n in ("0", "1", "2")})
    used, limit = (found[f"kv_tier_{what}_bytes", "1"] for what in ("used", "capacity"))
    if used > limit:
        seen.problems.append(f"the gauge has {used:.0f} bytes of DRAM in use, of {limit:.0f}")


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
