"""`recovery`: how soon a killed agent answers again, and what a page costs it in heap and in shared
memory, where the page table lies.

The volume is filled through an agent, with real pages of the least size, so that whatever the
storage keeps about pages is there as it is in service. Then the journal is brought to a checkpoint
with a log of a tenth of it (`mix`), and for each round the agent is killed (SIGKILL) and started
again: the clock runs from the start of the process until a client has an answer that finds what the
volume holds, and, apart, what DRAM held. There is nothing to compare with: an agent that forgets
answers sooner.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from typing import Final

import numpy as np

from kvtier_agent.bench import machine, mix
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
MIX_SECONDS: Final = 600.0
NVME, DRAM = 2, 1
NOTHING_BESIDE: Final = "an agent that forgets its pages has nothing to recover"
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
    """Figures `pages_<n>`, found on the volume, and `dram_pages_<n>`, of `DRAM_PAGES`, beside a
    table of all of them. Raises `BenchError` and `AgentError`."""
    client = stand.client()
    empty = machine.heap_bytes(stand.agent.pid)
    chains = _fill(client, settings.pages + DRAM_PAGES, say)
    known = settings.pages + DRAM_PAGES
    heap = (_settled_heap(stand.agent.pid) - empty) / known
    tables = stand.agent.folder.rglob("*.table")
    shared = sum(table.stat().st_blocks * 512 for table in tables) / known
    say("waiting for a checkpoint, and a log of a tenth of it behind that")
    churn = _Churn(client, chains)
    read = mix.bring_about(stand.volume_folder(), churn, MIX_SECONDS)
    tiers = client.stats()["tiers"]
    asked = _Asked(client, chains, churn.last)
    client.close()
    if not sum(asked.expected[NVME]):
        raise BenchError("no page reached the drive; use more --pages")
    seconds: dict[int, list[float]] = {NVME: [], DRAM: []}
    for number in range(settings.rounds):
        say(f"kill and start, {number + 1} of {settings.rounds}")
        stand.agent.kill()
        for tier, value in _restart(stand, asked).items():
            seconds[tier].append(value)
    extra = {
        "heap_bytes_per_page": heap,
        "shared_bytes_per_page": shared,
        "pages_on_drive": float(tiers["nvme"]["pages"]),
        "checkpoint_bytes": float(read.checkpoint_bytes),
        "log_bytes": float(read.log_bytes),
    }
    held = {"pages_in_dram": float(tiers["dram"]["pages"])}
    return [
        Figure(name, Spread.of(found), None, NOTHING_BESIDE, "seconds", False, more)
        for name, found, more in (
            (name_of(settings.pages), seconds[NVME], extra),
            (f"dram_{name_of(DRAM_PAGES)}", seconds[DRAM], held),
        )
    ]


class _Churn:
    """Each call deletes the pages of a chain and stores them again. `last`: chains that were stored
    last, and lie in DRAM."""

    def __init__(self, client: Client, chains: list[np.ndarray]) -> None:
        self._client = client
        self._turn = itertools.cycle(chains)
        self._data = touched(CHAIN, PAGE_BYTES)
        self.last = chains[-2:]

    def __call__(self) -> None:
        keys = next(self._turn)
        self._client.delete(keys)
        _put(self._client, keys, self._data, time.monotonic() + SETTLE_SECONDS)
        self.last = [*self.last[-1:], keys]


class _Asked:
    """Chains that are asked for after a restart, and how many pages of each were in which tier.
    What lay in DRAM is asked for apart: it is back sooner."""

    def __init__(self, client: Client, chains: list[np.ndarray], last: list[np.ndarray]) -> None:
        some = chains[:: max(1, len(chains) // SAMPLE)]
        self.chains = {NVME: some, DRAM: last}
        self.expected = {tier: self.found(client, tier) for tier in self.chains}

    def found(self, client: Client, tier: int) -> list[int]:
        """Pages of each chain in this tier."""
        return [int((client.lookup(keys).tiers == tier).sum()) for keys in self.chains[tier]]

    def there(self, client: Client, tier: int) -> bool:
        """Are at least 99 of 100 pages there again?"""
        return sum(self.found(client, tier)) >= 0.99 * sum(self.expected[tier])


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
        end = _put(client, keys, data, end)
    while client.stats()["write_queue_bytes"]:
        if time.monotonic() > end:
            raise BenchError(f"the drive took no page for {SETTLE_SECONDS:g} s")
        time.sleep(0.05)
    return chains


def _put(client: Client, keys: np.ndarray, data: np.ndarray, end: float) -> float:
    """Put these pages, no further ahead of the drive than `QUEUE_BYTES`; until when the next may
    take. Raises `BenchError` when none is taken until `end`."""
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
    return end


def _restart(stand: Stand, asked: _Asked) -> dict[int, float]:
    """Seconds until a client finds what each tier held before."""
    begin = time.perf_counter()
    end = begin + RECOVER_SECONDS
    stand.agent.start()
    found: dict[int, float] = {}
    with Client(
        stand.agent.socket, GEOMETRY, timeout_seconds=CALL_SECONDS, name="bench", raise_errors=True
    ) as client:
        while time.perf_counter() < end:
            for tier in (DRAM, NVME):
                # While pages are still being found again the agent answers, and has none.
                with contextlib.suppress(AgentError):
                    if tier not in found and asked.there(client, tier):
                        found[tier] = time.perf_counter() - begin
            if len(found) == len(asked.chains):
                return found
            gone = stand.agent.alive()
            if gone:
                raise BenchError(gone)
            time.sleep(LOOK_SECONDS)
    missing = " and ".join(
        {NVME: "the drive", DRAM: "DRAM"}[t] for t in (NVME, DRAM) if t not in found
    )
    raise BenchError(
        f"the pages of {missing} were not found within {RECOVER_SECONDS:g} s after the restart"
    )
