"""One replay through an agent whose drive fails, and what is to be true of it afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.snapshot import check_books
from kvtier_agent.replay.driver import Plan, replay
from kvtier_agent.replay.report import Report
from kvtier_agent.replay.trace import Trace
from kvtier_agent.server.client import Client
from kvtier_agent.storage.io_errors import SLOW_SECONDS
from small_agent import SmallAgent, sweep

from faults.drive import SLOW, Chances, FailingDrive

REST_SECONDS = 120.0
MOVE_PAGES = 8
"""Of a batch: small ones, for many calls."""
MOST_REPLAYS = 20
AGAIN = 400
"""Requests that are asked once more when the drive works again."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a page; pages of each tier."""

    page_bytes: int = 16384
    l0: int = 64
    l1: int = 256
    l2: int = 4000


WHOLE = Sizes(8192, l0=256, l1=4096, l2=30_000)
"""For a whole trace: DRAM that gives NVMe time, at the speed of a replay that waits for nothing."""


@dataclass(frozen=True, slots=True)
class Seen:
    """`during`: the replays over faults. `after`: the last of their requests again, without.
    `injected`, `counted`: faults by (operation, fault), as the drive and as the agent has it.
    `leaks`: what is still held at rest, and loops that are not well or died."""

    during: list[Report]
    after: Report
    injected: dict[tuple[str, str], int]
    counted: dict[tuple[str, str], int]
    counters: dict[str, int]
    late: int
    """Transfers of rings that were slow."""
    leaks: list[str]

    @property
    def hits_l2(self) -> int:
        """Pages that came from the drive while it failed."""
        return sum(report.whole.l2 for report in self.during)

    def problems(self) -> list[str]:
        """One line for each promise that was not kept."""
        found = list(self.leaks)
        reports = [*(("during", report) for report in self.during), ("after", self.after)]
        for name, report in reports:
            if report.wrong_bytes or report.wrong_pages:
                found.append(f"{name} the faults: {report.wrong_bytes} wrong bytes were served")
            if report.failed_requests:
                found.append(f"{name} the faults: {report.failed_requests} requests failed")
        for kind in sorted({*self.injected, *self.counted}):
            injected, counted = self.injected.get(kind, 0), self.counted.get(kind, 0)
            # A busy machine makes slow calls of its own.
            if counted < injected or (counted > injected and kind[1] != SLOW):
                found.append(f"{' '.join(kind)}: {injected} happened, {counted} were counted")
        return found


class _Quiet:
    """Watches nothing: the agent is in this process."""

    def advance(self, blocks: int, totals: Callable[[], object]) -> None:
        pass

    def alive(self) -> str:
        return ""


def run(
    trace: Trace,
    folder: Path,
    seed: int,
    chances: Chances,
    sizes: Sizes,
    least_faults: int = 0,
    kind: type[FailingDrive] = FailingDrive,
    every: frozenset[str] = frozenset(),
) -> Seen:
    """`folder`: of the agent's sockets and volume, with a short name. The trace is replayed with
    other keys until there were `least_faults`, and `every` fault of these (which may need a read
    that hits NVMe), at most `MOST_REPLAYS` times. `kind`: of drive; the first has no rings."""
    drive = kind(seed, chances)
    page = sizes.page_bytes
    agent = SmallAgent(
        folder, l0=sizes.l0 * page, l1=sizes.l1 * page, l2=sizes.l2 * (page + 4096), io=drive,
        cache={"move_bytes": MOVE_PAGES * page},
        core={"slow_io_seconds": min(SLOW_SECONDS, chances.slow_seconds / 2)},
    )  # fmt: skip
    during: list[Report] = []
    try:
        _lay_out(agent, trace, page)
        drive.failing = True
        while not during or (
            len(during) < MOST_REPLAYS
            and (
                sum(drive.injected.values()) < least_faults
                or every - {fault for _, fault in drive.injected}
            )
        ):
            plan = Plan(page, seed=seed + len(during))
            during.append(replay(trace, agent.socket(), plan, _Quiet()))
        drive.failing = False
        some = replace(trace, requests=trace.requests[-AGAIN:])
        after = replay(some, agent.socket(), plan, _Quiet())
        return Seen(
            during, after, dict(drive.injected), dict(agent.core.io_faults()),
            agent.call(agent.core.cache.counters.as_dict), getattr(drive, "late", 0),
            _leaks(agent),
        )  # fmt: skip
    finally:
        drive.failing = False
        agent.close()
        sweep(folder)


def _lay_out(agent: SmallAgent, trace: Trace, page_bytes: int) -> None:
    """The first engine's pages give the tiers their slots. A drive that fails just then refuses the
    engine, which is no fault in a replay."""
    geometry = Geometry.of_page_bytes(page_bytes, trace.block_tokens, weights="replay")
    with Client(agent.socket(), geometry, timeout_seconds=30.0) as client:
        assert client.wait_connected(30.0), client.counters.last_error


def _leaks(agent: Any) -> list[str]:
    """Waits for rest."""
    cache = agent.core.cache
    end = time.monotonic() + REST_SECONDS
    while agent.call(lambda: cache.traffic.in_flight + len(cache.traffic.moves)):
        if time.monotonic() > end:
            return ["traffic between the tiers never came to rest"]
        time.sleep(0.05)
    agent.call(lambda: check_books(cache), 60)
    now = agent.call(lambda: cache.snapshot(time.monotonic()))
    found = {
        "leases": now.leases, "reservations": now.reservations, "loads": now.pending_tickets,
        "pinned pages": now.pinned_pages, "bytes in the write queue": now.write_queue_bytes,
    }  # fmt: skip
    leaks = [f"{count} {what} are left" for what, count in found.items() if count]
    leaks += [f"loop {cause}" for cause in agent.supervisor.causes()]
    leaks += [f"loop {x.name} died" for x in agent.supervisor.health() if x.restarts]
    return leaks
