"""A real agent under replay for a long time: memory and descriptors stay, and at rest nothing is
held. Clients come and go meanwhile, and some are killed with their hands full."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, median_low
from typing import Any

import numpy as np
from agent_process import AgentProcess
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.replay.driver import Plan, replay
from kvtier_agent.replay.sessions import SessionSettings, SessionTraffic
from kvtier_agent.replay.trace import Trace
from kvtier_agent.server.client import Client
from nursery import Nursery

MIB = 1 << 20
PAGE_BYTES = 16384
BLOCK_TOKENS = 512
GEOMETRY = Geometry.of_page_bytes(PAGE_BYTES, BLOCK_TOKENS, weights="replay")
HBM, DRAM, NVME = 8 * MIB, 24 * MIB, 160 * MIB
POLICY = f"""
apiVersion: kvtier.io/v1alpha1
kind: KVTierPolicy
metadata: {{name: soak}}
spec:
  tiers:
    hbm: {{size: {HBM}}}
    dram: {{size: {DRAM}}}
    nvme: {{size: {NVME}, volumes: [data0], reservePercent: 0}}
  valueDensity: {{model: classic}}
"""
REQUESTS = 300
"""Of one replay; the next one has keys of its own."""
LIVES_SECONDS = 0.5
"""How long a client that is to be killed lives, at most."""
MOST_DRIFT = 0.02
REST_SECONDS = 60.0
WARM_SECONDS = 360.0
WARM_PART = 2
"""So long, or one part in so many of a short soak, is for warming up, at full speed: memory that is
kept for the busiest moment is there before anything is compared. Seen: three minutes, on a machine
with other work to do."""


def warm_seconds(seconds: float) -> float:
    """Of a soak of so many seconds."""
    return min(WARM_SECONDS, seconds / WARM_PART)


@dataclass(frozen=True, slots=True)
class Sample:
    """Of the agent's process: seconds since the start, resident bytes, open descriptors; and of
    the resident bytes, those of its own memory (the rest is shared with clients, or of files)."""

    at: float
    resident: int
    descriptors: int
    own: int


@dataclass(slots=True)
class Soak:
    """What was seen."""

    samples: list[Sample] = field(default_factory=list)
    requests: int = 0
    hits: int = 0
    wrong_bytes: int = 0
    failed_requests: int = 0
    killed_clients: int = 0
    problems: list[str] = field(default_factory=list)

    def windows(self) -> tuple[list[Sample], list[Sample]]:
        """The samples of the first and of the last quarter, after the time to warm up."""
        end = self.samples[-1].at
        warm = [sample for sample in self.samples if sample.at >= warm_seconds(end)]
        part = max(1, len(warm) // 4)
        return warm[:part], warm[-part:]

    @property
    def drift(self) -> float:
        """Growth of the agent's own memory, as a part of it. What it shares is not in it: the page
        table becomes resident row by row as rows are first used, up to its size, and the arenas
        are as large as the policy says."""
        first, last = (median(x.own for x in part) for part in self.windows())
        return last / first - 1

    @property
    def more_descriptors(self) -> int:
        """In the middle of the samples: a client that was killed just now still has some."""
        first, last = (
            median_low([x.descriptors for x in part if x.descriptors] or [0])
            for part in self.windows()
        )
        return last - first

    def judge(self) -> None:
        """Adds what is wrong to `problems`."""
        if self.drift > MOST_DRIFT:
            self.problems.append(f"memory of its own grew by {self.drift:.1%}")
        if self.more_descriptors > 0:
            self.problems.append(f"{self.more_descriptors} more descriptors are open")
        if self.wrong_bytes:
            self.problems.append(f"{self.wrong_bytes} wrong bytes were served")
        if self.failed_requests:
            self.problems.append(f"{self.failed_requests} requests failed")


class _OverError(Exception):
    """The time is over."""


class _Watch:
    """Looks at the process between requests, kills a client now and then, and ends the run."""

    def __init__(
        self, agent: AgentProcess, soak: Soak, nursery: Nursery, seconds: float, seed: int
    ) -> None:
        self._agent = agent
        self._soak = soak
        self._nursery = nursery
        self._chance = random.Random(seed)
        self._begin = time.monotonic()
        self._end = self._begin + seconds
        self._warm_at = self._begin + warm_seconds(seconds)
        self._every = max(0.2, seconds / 400)
        self._next_look = self._begin
        self._kill_every = max(1.0, seconds / 100)
        self._next_kill = self._begin + self._kill_every
        self._victim: tuple[int, float] | None = None

    @property
    def warm(self) -> bool:
        return time.monotonic() >= self._warm_at

    def advance(self, blocks: int, totals: Callable[[], object]) -> None:
        now = time.monotonic()
        if self._victim is not None and now >= self._victim[1]:
            os.kill(self._victim[0], signal.SIGKILL)
            self._soak.killed_clients += 1
            self._victim = None
        if now >= self._end:
            raise _OverError
        if now >= self._next_look:
            self._next_look = now + self._every
            self._soak.samples.append(self._look(now - self._begin))
        if now >= self._next_kill and self._victim is None:
            self._next_kill = now + self._kill_every
            kind = self._chance.choice(["put", "load", "both"])
            pid = self._nursery.birth(kind, self._chance.randrange(1 << 30))
            self._victim = (pid, now + self._chance.random() * LIVES_SECONDS)

    def alive(self) -> str:
        """Why the agent is gone, "" while it runs."""
        assert self._agent.process is not None
        status = self._agent.process.poll()
        return "" if status is None else f"the agent ended with {status}: {self._agent.tail()}"

    def _look(self, at: float) -> Sample:
        assert self._agent.process is not None
        folder = Path("/proc") / str(self._agent.process.pid)
        status = dict(
            line.split(":", 1)
            for line in (folder / "status").read_text().splitlines()
            if ":" in line
        )
        resident, own = (int(status[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon"))
        # While a client that is to die has its connections, those are no leak.
        held = sum(1 for _ in (folder / "fd").iterdir())
        return Sample(at, resident, held if self._victim is None else 0, own)


def soak(
    root: Path, seconds: float, seed: int, speed: float | None = 40.0,
    say: Callable[[str], None] = lambda _: None,
) -> Soak:  # fmt: skip
    """`speed`: trace seconds per second, None for as fast as it goes."""
    seen = Soak()
    with AgentProcess(root, policy=POLICY) as agent:
        agent.ready()
        with Client(agent.socket, GEOMETRY, timeout_seconds=10.0, name="watcher") as watcher:
            assert watcher.wait_connected(60.0)
            keys = root / "keys"
            some = np.random.default_rng(seed).integers(0, 256, (400, 16), dtype=np.uint8)
            some.tofile(keys)
            for start in range(0, len(some), 20):  # what those who are killed load
                watcher.put(some[start : start + 20], np.zeros((20, PAGE_BYTES), np.uint8))
            with Nursery(agent.socket, GEOMETRY, keys) as nursery:
                watch = _Watch(agent, seen, nursery, seconds, seed)
                _traffic(agent, seen, watch, seed, speed, say)
            seen.problems += at_rest(agent, watcher)
        code, body = agent.get("/healthz")
        if code != 200:
            seen.problems.append(f"health is red: {body.strip()}")
        if agent.stop() != 0:
            seen.problems.append("the agent did not stop in good order")
    seen.judge()
    return seen


def _traffic(
    agent: AgentProcess, seen: Soak, watch: _Watch, seed: int, speed: float | None,
    say: Callable[[str], None],
) -> None:  # fmt: skip
    traffic = SessionTraffic(SessionSettings(seed=seed, block_tokens=BLOCK_TOKENS)).requests()
    number = 0
    while True:
        trace = Trace(requests=[next(traffic) for _ in range(REQUESTS)], block_tokens=BLOCK_TOKENS)
        number += 1
        try:
            plan = Plan(PAGE_BYTES, speed if watch.warm else None, seed=number)
            report = replay(trace, agent.socket, plan, watch)
        except _OverError:
            return
        seen.requests += report.requests
        seen.hits += report.whole.hits
        seen.wrong_bytes += report.wrong_bytes
        seen.failed_requests += report.failed_requests
        last = seen.samples[-1]
        say(
            f"{last.at:.0f} s: {seen.requests} requests, {last.resident / MIB:.1f} MiB resident"
            f" ({last.own / MIB:.1f} its own),"
            f" {last.descriptors} descriptors, {seen.killed_clients} clients killed"
        )


def at_rest(agent: AgentProcess, watcher: Client) -> list[str]:
    """What is still held though nobody does anything."""

    def held() -> list[str]:
        stats: dict[str, Any] = watcher.stats()
        names = ("leases", "reservations", "pinned_pages", "pending_loads", "write_queue_bytes")
        found = [f"{stats[name]} {name} are left" for name in names if stats[name]]
        for name, tier in stats["tiers"].items():
            if tier["moving_pages"]:
                found.append(f"{tier['moving_pages']} pages of {name} never arrive")
            # Slots of NVMe whose page is gone come back with their segment.
            if name != "nvme" and tier["used_bytes"] != tier["pages"] * PAGE_BYTES:
                found.append(f"{name}: {tier['used_bytes']} bytes for {tier['pages']} pages")
        if stats["clients"] != 1:
            found.append(f"{stats['clients'] - 1} clients too many")
        return found

    end = time.monotonic() + REST_SECONDS
    while (left := held()) and time.monotonic() < end:
        time.sleep(0.1)
    on_disk = sum(p.stat().st_blocks * 512 for p in agent.volume.rglob("*") if p.is_file())
    if on_disk > NVME:
        left.append(f"{on_disk} bytes on the volume, the cap is {NVME}")
    return left
