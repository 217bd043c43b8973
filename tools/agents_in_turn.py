"""A place where agents follow upon each other, for tests: the core of each, on one thread, without
sockets. Pages are named by numbers, from which their keys and bytes follow."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import xxhash
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.results import MISS
from kvtier_agent.cache.settings import Behaviour, Budgets, CacheSettings, FrozenPrefix
from kvtier_agent.storage.core import Core, CoreSettings
from kvtier_agent.storage.fileio import FileIO

PAGE = 4096
GEOMETRY = Geometry.of_page_bytes(PAGE, 16)
KEYS = np.random.default_rng(7).integers(0, 256, (400, 16), dtype=np.uint8)


def page(i: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of page `i`."""
    return np.random.default_rng(1000 + i).integers(0, 256, PAGE, dtype=np.uint8)


class Node:
    """`core`: of the agent that runs, if one does. `io`: its system calls on volumes. Use as a
    context manager: the last agent is ended."""

    def __init__(self, folder: Path, *, volumes: Sequence[str] = ("data0",)) -> None:
        self.folder = folder
        self.volumes = tuple(volumes)
        self.table = folder / "d.table"
        self.l1 = folder / "d.l1"
        self.io: FileIO | None = None
        self.core: Core | None = None
        for name in volumes:
            (folder / name).mkdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.core is not None:
            self.core.close()

    def start(self, l1: int = 100, l2: int = 0, maximum: int = 256, **options: Any) -> Core:
        """The next agent under a revision, with so many pages per tier. L0 is the engine's."""
        core = self.agent(maximum, **options)
        core.reconfigure(1.0, *self.revision(l1, l2))
        return core

    def revision(self, l1: int = 100, l2: int = 0) -> tuple[Behaviour, Budgets]:
        """What `start` puts in force."""
        volumes = self.volumes if l2 else ()
        behaviour = Behaviour(frozen=(FrozenPrefix("bot", 8 * PAGE),))
        return behaviour, Budgets(0, l1 * PAGE, l2 * 2 * PAGE, volumes, 0)

    def agent(self, maximum: int = 256, max_pages: int = 4096, **options: Any) -> Core:
        """The next agent, without a revision."""
        self.core = Core(
            CoreSettings(
                "d", self.folder, self.table, {name: self.folder / name for name in self.volumes},
                maximum * PAGE, maximum * PAGE, allow_root_filesystem=True, synchronous=True,
                cache=CacheSettings(max_pages=max_pages), **options,
            ),
            io=self.io,
        )  # fmt: skip
        return self.core

    def kill(self) -> None:
        """As SIGKILL does it: descriptors are closed, nothing else happens."""
        core, self.core = self.core, None
        assert core is not None
        os.close(core.memory._lock)
        core.memory._lock = -1
        core.nvme.close()

    def stop(self) -> bool:
        """In good order; was memory left to the next?"""
        core, self.core = self.core, None
        assert core is not None
        return core.close()

    def end(self, way: str) -> None:
        """`way`: kill or stop."""
        assert getattr(self, way)() in (None, True)


def put(core: Core, which: Iterable[int], **options: Any) -> None:
    """Store these pages."""
    assert core.register(1.0, GEOMETRY).accepted
    for i in which:
        key = KEYS[i : i + 1]
        result = core.cache.reserve(1.0, 1, key, **options)
        assert result.tier[0] == 1, result.status
        start = int(result.offset[0])
        core.l1.bytes[start : start + PAGE] = page(i)
        sums = np.array([xxhash.xxh3_64_intdigest(page(i))], dtype=np.uint64)
        assert (core.cache.commit(1.0, 1, key, sums) == 0).all()
        settle(core)


def settle(core: Core) -> None:
    """Until nothing moves."""
    for _ in range(100):
        core.pump()
        core.collect(1.0)
        if not core.cache.traffic.in_flight and not core.cache.traffic.moves:
            return


def right(core: Core, which: Iterable[int]) -> list[int]:
    """Pages that load with their own bytes; every other answer has to be a miss."""
    out = []
    for i in which:
        ticket = core.cache.load(2.0, 2, KEYS[i : i + 1], 1e9)
        core.pump()
        done = [ticket, *core.collect(2.0)][-1]
        if done.tier[0] != MISS:
            start = int(done.offset[0])
            copy = core.l1.bytes[start : start + PAGE].copy()
            if xxhash.xxh3_64_intdigest(copy) == int(done.checksum[0]):
                assert np.array_equal(copy, page(i)), "a wrong byte would have been served"
                out.append(i)
            else:
                core.cache.report_bad(2.0, 2, done.lease, np.array([0]))
        core.cache.release(2.0, 2, done.lease)
    return out
