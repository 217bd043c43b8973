"""Real SIGKILLs of a real agent under load, on a real file system, seen through the client library.

An engine stores and loads while the agent is killed at a moment of chance and started again. In
turn the NVMe tier has room for all pages (then what a lookup saw in it must be there after the
kill) and room for a part of them (then segments are used again all the time). The durability is
`sync` or `async`: a kill takes neither, since what was written is with the kernel.
"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from agent_process import AgentProcess
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.identity import chain_keys
from kvtier_agent.server.client import Client

GEOMETRY = Geometry.of_page_bytes(64 * 1024, 256)
CHAINS, PAGES = 40, 8
"""20 MiB of pages in all."""
POLICY = """
apiVersion: kvtier.io/v1alpha1
kind: KVTierPolicy
metadata: {{name: crash}}
spec:
  tiers:
    hbm: {{size: 1Mi}}
    dram: {{size: 3Mi}}
    nvme: {{size: {nvme}Mi, volumes: [data0], reservePercent: 0}}
  valueDensity: {{model: classic}}
  durability: {durability}
"""
ROOMY, TIGHT = 64, 12


@dataclass(slots=True)
class KillTally:
    """What was seen over all kills."""

    kills: int = 0
    pages_loaded: int = 0
    wrong_bytes: int = 0
    promised: int = 0
    """Pages that a lookup saw on NVMe just before a kill, the tier having room for all."""
    promises_broken: int = 0
    cap_broken: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def bad(self) -> int:
        return self.wrong_bytes + self.promises_broken + self.cap_broken


def kill_run(
    root: Path,
    kills: int,
    seed: int,
    tally: KillTally,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """`kills` kills, in runs of five on a volume of their own. AssertionError when an agent does
    not come back."""
    chance = random.Random(seed)
    run = 0
    while tally.kills < kills:
        durability = ("sync", "async")[run % 2]
        nvme = (ROOMY, TIGHT)[run // 2 % 2]
        _run(root / str(run), min(5, kills - tally.kills), chance, tally, durability, nvme)
        progress(f"{tally.kills} kills, {tally.bad} findings ({durability}, {nvme} MiB)")
        run += 1


def _run(
    root: Path, kills: int, chance: random.Random, tally: KillTally, durability: str, nvme: int
) -> None:
    root.mkdir()
    policy = POLICY.format(nvme=nvme, durability=durability)
    with AgentProcess(root, policy=policy) as agent:
        agent.ready()
        with Client(agent.socket, GEOMETRY, timeout_seconds=2.0) as client:
            for _ in range(kills):
                agent.until(client.ping, "the client is connected", timeout=60.0)
                seen = _load_until_killed(agent, client, chance, tally)
                tally.kills += 1
                agent.start().ready()
                agent.until(client.ping, "the client is connected again", timeout=60.0)
                agent.until(partial(_serves, client, seen), "the revision is in force")
                _judge(root, client, tally, seen if nvme == ROOMY else set(), nvme)


def _serves(client: Client, seen: set[int]) -> bool:
    """Is NVMe there again? Pages of DRAM are, before the first revision is in force."""
    return not seen or any((_tiers(client, chain) == 2).any() for chain in range(CHAINS))


def _load_until_killed(
    agent: AgentProcess, client: Client, chance: random.Random, tally: KillTally
) -> set[int]:
    """Traffic until the agent is gone; pages (chain * PAGES + number) last seen on NVMe."""
    seen: set[int] = set()
    killer = threading.Timer(chance.uniform(0.5, 2.5), agent.send, (signal.SIGKILL,))
    killer.start()
    while killer.is_alive():
        chain = chance.randrange(CHAINS)
        # What is loaded may go up into HBM, whose pages leave NVMe and do not survive.
        seen -= {chain * PAGES + number for number in range(PAGES)}
        _load(client, chain, tally)
        client.put(_keys(client, chain), _pages(chain))
        for other in chance.sample(range(CHAINS), 4):
            if other == chain:
                continue
            tiers = _tiers(client, other)
            seen |= {other * PAGES + int(i) for i in np.flatnonzero(tiers == 2)}
    killer.join()
    assert agent.process is not None
    agent.process.wait(30)
    return seen


def _judge(root: Path, client: Client, tally: KillTally, seen: set[int], nvme: int) -> None:
    held = sum(p.stat().st_blocks * 512 for p in root.glob("data0/kvtier/default/*-*.*"))
    if held > nvme << 20:
        tally.cap_broken += 1
        tally.problems.append(f"kill {tally.kills}: {held} bytes on the volume of {nvme} MiB")
    dropped = client.stats()["counters"]["dropped_found_pages"]
    if dropped and nvme == ROOMY:
        tally.promises_broken += dropped
        tally.problems.append(f"kill {tally.kills}: {dropped} pages found on NVMe were not kept")
    for chain in range(CHAINS):
        there = {chain * PAGES + int(i) for i in np.flatnonzero(_tiers(client, chain) <= 2)}
        mine = {page for page in seen if page // PAGES == chain}
        tally.promised += len(mine)
        if lost := mine - there:
            tally.promises_broken += len(lost)
            tally.problems.append(f"kill {tally.kills}: {len(lost)} pages of NVMe are gone")
        _load(client, chain, tally)


def _load(client: Client, chain: int, tally: KillTally) -> None:
    copy = np.zeros((PAGES, GEOMETRY.page_bytes), dtype=np.uint8)
    with client.load(_keys(client, chain)) as lease:
        good = lease.copy_to(copy)
    right = (copy == _pages(chain)).all(axis=1)
    tally.pages_loaded += int(good.sum())
    wrong = int((good & ~right).sum())
    if wrong:
        tally.wrong_bytes += wrong
        tally.problems.append(f"kill {tally.kills}: {wrong} pages of chain {chain} are wrong")


def _tiers(client: Client, chain: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return client.lookup(_keys(client, chain)).tiers


def _keys(client: Client, chain: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    tokens = np.arange(PAGES * 256, dtype=np.uint32) + np.uint32(chain << 16)
    return chain_keys(client.root, tokens, 256)


def _pages(chain: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Each page of each chain has bytes of its own."""
    pages = np.empty((PAGES, GEOMETRY.page_bytes), dtype=np.uint8)
    for number in range(PAGES):
        pages[number] = (chain * PAGES + number + np.arange(GEOMETRY.page_bytes)) % 251
    return pages
