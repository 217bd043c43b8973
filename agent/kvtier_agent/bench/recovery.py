"""`recovery`: how soon a killed agent answers again, and what a page costs it in heap and in shared
memory, where the page table lies.

The volume is filled through an agent, with real pages of the least size, so that whatever the
storage keeps about pages is there as it is in service. Then, for each round, the agent is killed
(SIGKILL) and started again, and the clock runs from the start of the process until a client has an
answer that finds what the volume holds. There is nothing to compare with: an agent that forgets
answers sooner.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Final

import numpy as np

from kvtier_agent.bench import machine
from kvtier_agent.bench.errors import BenchError
from kvtier_agent.bench.figures import Figure, Spread
from kvtier_agent.bench.settings import RecoverySettings
from kvtier_agent.bench.stand import CALL_SECONDS, Sizes, Stand, random_keys, touched
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.server.client import AgentError, Client

PAGE_BYTES: Final = 4096
GEOMETRY: Final = Geometry.of_page_bytes(PAGE_BYTES, 256)
CHAIN: Final = 1024
DRAM_PAGES: Final = 16 * CHAIN
"""Put on top of the pages that are to lie on the drive: they push those out of DRAM."""
QUEUE_BYTES: Final = 8 * CHAIN * PAGE_BYTES
"""Pages are put no further ahead of the drive than this."""
SETTLE_SECONDS: Final = 120.0
"""How long nothing may happen before it is a problem."""
RECOVER_SECONDS: Final = 600.0
HEAP_SECONDS: Final = 12.0
"""An agent gives back what it freed every ten seconds."""
LOOK_SECONDS: Final = 0.02
"""Between two looks at a restarted agent, which needs its time for other things."""
SAMPLE: Final = 16
"""Every so many chains one is asked for after a restart."""
_BYTES_A_PAGE: Final = 3 * PAGE_BYTES
"""On the volume, with headers and half-empty segments; a bound, not a measurement."""


def sizes(settings: RecoverySettings) -> Sizes:
    return Sizes(dram=DRAM_PAGES * PAGE_BYTES, nvme=settings.pages * _BYTES_A_PAGE + (1 << 30))


def name_of(pages: int) -> str:
    """`pages_1e6` for a million."""
    digits = len(str(pages)) - 1
    return f"pages_1e{digits}" if pages == 10**digits else f"pages_{pages}"


def run(stand: Stand, settings: RecoverySettings, say: Callable[[str], None]) -> list[Figure]:
    """Figure `pages_<n>`. Raises `BenchError` and `AgentError`."""
    client = stand.client()
    empty = machine.heap_bytes(stand.agent.pid)
    chains = _fill(client, settings.pages + DRAM_PAGES, say)
    known = settings.pages + DRAM_PAGES
    heap = (_settled_heap(stand.agent.pid) - empty) / known
    tables = stand.agent.folder.rglob("*.table")
    shared = sum(table.stat().st_blocks * 512 for table in tables) / known
    held = client.stats()["tiers"]["nvme"]["pages"]
    chains = chains[: settings.pages // CHAIN] or chains[:1]
    asked = chains[:: max(1, len(chains) // SAMPLE)]
    # What lay in DRAM alone is lost by a kill: the promise is about pages on the volume.
    expected = [int((client.lookup(keys).tiers == 2).sum()) for keys in asked]
    client.close()
    if not sum(expected):
        raise BenchError("no page reached the drive; use more --pages")
    seconds: list[float] = []
    for number in range(settings.rounds):
        say(f"kill and start, {number + 1} of {settings.rounds}")
        stand.agent.kill()
        seconds.append(_restart(stand, asked, expected))
    return [
        Figure(
            name_of(settings.pages), Spread.of(seconds), None,
            "an agent that forgets its pages has nothing to recover", "seconds", False,
            {
                "heap_bytes_per_page": heap,
                "shared_bytes_per_page": shared,
                "pages_on_drive": float(held),
            },
        )
    ]  # fmt: skip


def _settled_heap(pid: int) -> int:
    """Bytes of a process that was busy until just now, once it had time to tidy."""
    looks = []
    end = time.monotonic() + HEAP_SECONDS
    while time.monotonic() < end:
        looks.append(machine.heap_bytes(pid))
        time.sleep(0.5)
    return min(looks)


def _fill(client: Client, pages: int, say: Callable[[str], None]) -> list[np.ndarray]:
    """Put the pages, and wait until the drive has what it will get."""
    data = touched(CHAIN, PAGE_BYTES)
    chains = []
    end = time.monotonic() + SETTLE_SECONDS
    for number in range(-(-pages // CHAIN)):
        keys = random_keys((5, number), min(CHAIN, pages - number * CHAIN))
        chains.append(keys)
        if number % 100 == 0:
            say(f"{number * CHAIN} of {pages} pages are stored")
        left = keys
        while len(left):
            if client.stats()["write_queue_bytes"] <= QUEUE_BYTES:
                stored = client.put(left, data[: len(left)]).stored
                left = left[stored:]
                if stored:
                    end = time.monotonic() + SETTLE_SECONDS
            if len(left):
                if time.monotonic() > end:
                    raise BenchError(f"the agent took no page for {SETTLE_SECONDS:g} s")
                time.sleep(0.005)
    while client.stats()["write_queue_bytes"]:
        if time.monotonic() > end:
            raise BenchError(f"the drive took no page for {SETTLE_SECONDS:g} s")
        time.sleep(0.05)
    return chains


def _restart(stand: Stand, asked: list[np.ndarray], expected: list[int]) -> float:
    """Seconds until a client finds at least 99 of 100 pages that the drive held before."""
    begin = time.perf_counter()
    end = begin + RECOVER_SECONDS
    stand.agent.start()
    found: list[int] = []
    with Client(
        stand.agent.socket, GEOMETRY, timeout_seconds=CALL_SECONDS, name="bench", raise_errors=True
    ) as client:
        while time.perf_counter() < end:
            # While pages are still being found again the agent answers, and has none.
            with contextlib.suppress(AgentError):
                found = [int((client.lookup(keys).tiers == 2).sum()) for keys in asked]
            if sum(found) >= 0.99 * sum(expected):
                return time.perf_counter() - begin
            gone = stand.agent.alive()
            if gone:
                raise BenchError(gone)
            time.sleep(LOOK_SECONDS)
    raise BenchError(
        f"{sum(found)} of {sum(expected)} pages were found {RECOVER_SECONDS:g} s after the restart"
    )
