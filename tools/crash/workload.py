"""What is cut: the real cache over the real L2, with everything that writes to a volume.

Pages come and go, segments are used again, checkpoints are written, the tier shrinks and grows, the
durability changes, the agent ends in order or is killed and starts again. Each page's bytes follow
from its key, so a wrong byte is known wherever it shows up.

Pages go by rings where the recorder has them (`rings`), else by calls.

Into the trace go notes: `Stored` when L2 has told the cache that pages are written, `Released`
before they are given up, `Settings` when cap and durability change.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.record import NO_SLOT, Rows, State, as_bytes_keys
from kvtier_agent.cache.settings import Behaviour, Budgets, CacheSettings, Durability
from kvtier_agent.storage.core import Core, CoreSettings

from crash.disk import Change, RecordingIO
from crash.rings import RecordingRings, RingMover

PAGE = 4096
GEOMETRY = Geometry.of_page_bytes(PAGE, 16)
DOMAIN = "d"
MAXIMUM = 128 * PAGE


@dataclass(frozen=True, slots=True)
class Stored:
    keys: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class Released:
    keys: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class Settings:
    cap_bytes: int
    durability: Durability


def key_of(number: int) -> np.ndarray[Any, Any]:
    return np.frombuffer(number.to_bytes(4, "little") * 4, dtype=np.uint8)


@functools.cache
def page_of(key: bytes) -> np.ndarray[Any, Any]:
    """The bytes of a page."""
    seed = int.from_bytes(key[:4], "little")
    return np.random.default_rng(seed).integers(0, 256, PAGE, dtype=np.uint8)


def core_settings(root: Path) -> CoreSettings:
    """Of the core that the workload and the check after a cut run, in this folder."""
    arena = root / "arena"
    return CoreSettings(
        DOMAIN,
        arena,
        arena / "d.table",
        {"data0": root / "data0"},
        MAXIMUM,
        MAXIMUM,
        allow_root_filesystem=True,
        synchronous=True,
        keep_memory=False,
        cache=CacheSettings(max_pages=1024),
    )


class Workload:
    """`steps` rounds of chance over a volume in `root`, recorded by `io`."""

    def __init__(self, root: Path, io: RecordingIO, seed: int, steps: int) -> None:
        self.root = root
        self.io = io
        self.chance = random.Random(seed)
        self.steps = steps
        self.now = 1.0
        self.numbers = 0
        self.cap_bytes = 96 * 2 * PAGE
        self.durability: Durability = self.chance.choice(("sync", "sync", "async"))
        self.held: frozenset[bytes] = frozenset()
        self.recorded: frozenset[bytes] = frozenset()
        """Of those, what was stored while there was a journal."""
        self.shrunk = False
        """Since the last start: a smaller tier may have room for less at the next one."""
        self.core = self._start()

    def run(self) -> None:
        actions: tuple[tuple[int, Callable[[], None]], ...] = (
            (60, self._put),
            (10, self._load),
            (6, self._drop),
            (3, self._change),
            (1, self._stop),
            (1, self._kill),
        )
        weights = [weight for weight, _ in actions]
        for _ in range(self.steps):
            self.now += 1.0
            ((_, action),) = self.chance.choices(actions, weights)
            action()
            self._settle()
            self._check_cap()
        self.core.close()

    # -- what happens -------------------------------------------------------------------------

    def _put(self) -> None:
        count = self.chance.randrange(1, 9)
        if self.numbers > 40 and self.chance.random() < 0.3:
            some = self.chance.sample(range(max(0, self.numbers - 150), self.numbers), count)
        else:
            some = list(range(self.numbers, self.numbers + count))
            self.numbers += count
        keys = np.stack([key_of(number) for number in some])
        cache = self.core.cache
        result = cache.reserve(self.now, 1, keys)
        good = result.status == 0
        rows = self.core.memory.l1.rows(PAGE)
        for i in np.flatnonzero(good).tolist():
            rows[int(result.offset[i]) // PAGE] = page_of(keys[i].tobytes())
        kept = keys[good]
        sums = [xxhash.xxh3_64_intdigest(page_of(key.tobytes())) for key in kept]
        cache.commit(self.now, 1, kept, np.array(sums, dtype=np.uint64))

    def _load(self) -> None:
        if self.numbers:
            some = self.chance.sample(range(self.numbers), min(3, self.numbers))
            keys = np.stack([key_of(number) for number in some])
            ticket = self.core.cache.load(self.now, 1, keys, self.now + 30)
            self._settle()
            self.core.cache.release(self.now, 1, ticket.lease)

    def _drop(self) -> None:
        """L1 empties into L2: the tier is set to little, then to what it was."""
        for l1 in (8, 24):
            self._reconfigure(l1=l1)
            self._settle()

    def _change(self) -> None:
        before, self.cap_bytes = self.cap_bytes, self.chance.choice((48, 96, 96, 140)) * 2 * PAGE
        self.shrunk |= self.cap_bytes < before
        if self.chance.random() < 0.5:
            self.durability = self.chance.choice(("sync", "async", "none"))
        self._reconfigure()

    def _stop(self) -> None:
        self.core.close()
        self.core = self._start()

    def _kill(self) -> None:
        """The process is gone; what it wrote is with the kernel."""
        self.core._mover.close()
        for volume in self.core.nvme.volumes.values():
            volume.close()
        l2 = self.core.nvme.l2
        if l2 is not None:
            for segment, _ in l2.segments.values():
                segment.close()
            l2.segments.clear()
            l2.journals._held.clear()
        self.core.nvme.volumes.clear()
        self.core.memory.close()
        self.core = self._start()

    # -- how ----------------------------------------------------------------------------------

    def _start(self) -> Core:
        for name in ("data0", "arena"):
            (self.root / name).mkdir(exist_ok=True)
        self.core = core = Core(core_settings(self.root), io=self.io)
        if isinstance(self.io, RecordingRings):
            core._mover = RingMover(core)
        before = self.recorded
        submit = core._mover.submit

        def noted(moves: list[Any]) -> None:
            for move in moves:
                self._note()  # what has been given up by now, before its bytes go
                submit([move])

        core._mover.submit = noted  # type: ignore[method-assign]
        self.io.note(Settings(self.cap_bytes, self.durability))
        begun = len(self.io.trace)
        core.reconfigure(self.now, self._behaviour(), self._budgets())
        core.register(self.now, GEOMETRY)
        found = self._in_l2()
        if self.durability != "none" and not self.shrunk:
            assert before <= found, f"{len(before - found)} pages are gone by a mere restart"
        self.shrunk = False
        self.io.trace.insert(begun, Change("note", note=Released(before - found)))
        self.held = found
        return core

    def _reconfigure(self, l1: int = 24) -> None:
        self._note()
        self.io.note(Settings(self.cap_bytes, self.durability))
        if self.durability == "none":
            self.recorded = frozenset()
        self.core.reconfigure(self.now, self._behaviour(), self._budgets(l1))

    def _behaviour(self) -> Behaviour:
        return Behaviour(durability=self.durability, cool_down_seconds=0.0)

    def _budgets(self, l1: int = 24) -> Budgets:
        return Budgets(0, l1 * PAGE, self.cap_bytes, ("data0",), 0)

    def _settle(self) -> None:
        for _ in range(1000):
            self.core.pump()
            for move, outcome in self.core._mover.collect():
                self.core.cache.move_done(self.now, move, outcome)
            self._note()
            if not self.core.cache.traffic.in_flight:
                return
        raise AssertionError("traffic never comes to rest")

    def _in_l2(self) -> frozenset[bytes]:
        table = self.core.cache.table
        rows: Rows = table.live_rows()
        rows = rows[(table.l2_slot[rows] != NO_SLOT) & (table.state[rows] != State.DOWN12)]
        return frozenset(key.tobytes() for key in as_bytes_keys(table.key[rows]))

    def _note(self) -> None:
        now = self._in_l2()
        gone, new = self.held - now, now - self.held
        if gone:
            self.io.note(Released(gone))
        if new:
            self.io.note(Stored(new))
        self.held = now
        self.recorded = (self.recorded & now) | (new if self.durability != "none" else frozenset())

    def _check_cap(self) -> None:
        l2 = self.core.nvme.l2
        if l2 is None:
            return
        folder = self.root / "data0" / "kvtier" / DOMAIN
        held = sum(p.stat().st_blocks * 512 for p in folder.glob("*-*.*"))
        assert held == l2.allocated_bytes, f"{held} bytes are there, {l2.allocated_bytes} counted"
        pool = self.core.cache.shelves.pools[2]
        if pool.used <= pool.limit:
            assert held <= self.cap_bytes, f"{held} bytes, the cap is {self.cap_bytes}"
