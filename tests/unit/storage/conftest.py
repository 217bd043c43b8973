"""Builders: a volume in memory, a file system that fails when told, an L2 with pages."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import leftovers
import numpy as np
import pytest
import xxhash
from agents_in_turn import Node
from journal_work import IDENTITY, SETTINGS, CountingIO
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.storage.fileio import FileIO
from kvtier_agent.storage.journal import Journal
from kvtier_agent.storage.journal_files import Space
from kvtier_agent.storage.journal_reader import read_journal
from kvtier_agent.storage.l2 import L2
from kvtier_agent.storage.segment import PageStamp
from kvtier_agent.storage.volume import Volume

PAGE = 8192


class FaultyIO(FileIO):
    """Each list holds an error number per coming call: 0 = a short transfer, None = let it pass.
    Calls for segments and calls for the journal have lists of their own."""

    def __init__(self) -> None:
        self.writes: list[int | None] = []
        self.reads: list[int | None] = []
        self.allocations: list[int | None] = []
        self.journal_writes: list[int | None] = []
        self.free_bytes: tuple[int, int] | None = None
        self.flushes = 0
        self.journal_flushes = 0
        self.others: set[int] = set()

    @staticmethod
    def _fault(faults, buffers):
        fault = faults.pop(0) if faults else None
        if fault:
            raise OSError(fault, "injected")
        return buffers[:1] if fault == 0 else buffers

    def open(self, path, *, create, direct):
        fd, bypasses = super().open(path, create=create, direct=direct)
        (self.others.discard if direct else self.others.add)(fd)
        return fd, bypasses

    def write(self, fd, buffers, offset):
        if fd in self.others:
            if len(self._fault(self.journal_writes, [1, 2])) == 1:
                buffers = [buffers[0][:10]]
            return super().write(fd, buffers, offset)
        return super().write(fd, self._fault(self.writes, buffers), offset)

    def read(self, fd, buffers, offset):
        return super().read(fd, self._fault(self.reads, buffers), offset)

    def allocate(self, fd, offset, length):
        if fd not in self.others:
            self._fault(self.allocations, [])
        super().allocate(fd, offset, length)

    def flush(self, fd):
        if fd in self.others:
            self.journal_flushes += 1
        else:
            self.flushes += 1
        super().flush(fd)

    def free(self, folder):
        return self.free_bytes or super().free(folder)


def limit_slots(l2, slots, *, reserve=0, durability="async"):
    """The cap under which the tier has so many slots, beside its journal."""
    cap = slots * l2.stride + 8192
    for _ in range(8):
        have = l2.limit(cap, reserve, durability)
        if have == slots:
            return
        cap += (slots - have) * l2.stride
    raise AssertionError(f"no cap for {slots} slots")


@pytest.fixture
def mount() -> Iterator[Path]:
    """A folder that may serve as a volume: in memory, and not on the root file system."""
    with leftovers.folder_in_memory() as folder:
        yield Path(folder)


@pytest.fixture
def make_l2(mount):
    """Builds an L2 over `mount` with `slots` slots and an arena with recognisable pages; what was
    built before is closed first, as when an agent restarts."""
    opened: list[SimpleNamespace] = []

    def build(slots=20, *, io=None, geometry=None, reserve=0, durability="async"):
        for one in opened:
            one.l2.close()
            one.volume.close()
        opened.clear()
        geometry = geometry or Geometry.of_page_bytes(PAGE, 16)
        io = io or FaultyIO()
        volume = Volume("data0", mount, "d", allow_root_filesystem=True, io=io)
        l2 = L2([volume], geometry, io=io)
        limit_slots(l2, slots, reserve=reserve, durability=durability)
        # Page aligned like a real arena: O_DIRECT asks for it.
        flat = np.zeros(64 * geometry.slot_bytes + 4096, dtype=np.uint8)
        start = -flat.ctypes.data % 4096
        arena = flat[start : start + 64 * geometry.slot_bytes].reshape(64, -1)
        for i in range(32):
            arena[i] = np.random.default_rng(i).integers(0, 256, arena.shape[1], dtype=np.uint8)
        keys = np.random.default_rng(99).integers(0, 256, (64, 16), dtype=np.uint8)
        sums = np.array(
            [xxhash.xxh3_64_intdigest(row[: geometry.page_bytes]) for row in arena], dtype=np.uint64
        )

        def write(slots_, rows=None):
            slots_ = np.array(slots_, dtype=np.uint32)
            rows = slots_ if rows is None else np.array(rows, dtype=np.uint32)
            stamp = PageStamp(keys[rows], keys[rows][::-1].copy(), rows * 16, sums[rows])
            return l2.write(slots_, stamp, arena, rows)

        def read(slots_, rows=None):
            """Into arena rows from 32 on."""
            slots_ = np.array(slots_, dtype=np.uint32)
            rows = slots_ if rows is None else np.array(rows, dtype=np.uint32)
            into = np.arange(32, 32 + len(slots_), dtype=np.uint32)
            arena[32:] = 0
            status, error = l2.read(slots_, keys[rows], sums[rows], arena, into)
            return status, error, arena[into]

        one = SimpleNamespace(
            l2=l2, io=io, volume=volume, arena=arena, keys=keys, sums=sums, write=write, read=read,
            folder=volume.folder, limit=functools.partial(limit_slots, l2),
        )  # fmt: skip
        opened.append(one)
        return one

    yield build
    for one in opened:
        one.l2.close()
        one.volume.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """Where agents follow upon each other; the last one is ended."""
    with Node(tmp_path) as made:
        yield made


@pytest.fixture(params=["kill", "stop"])
def way(request: pytest.FixtureRequest) -> str:
    """How an agent ends."""
    return str(request.param)


@pytest.fixture
def io():
    return CountingIO()


@pytest.fixture
def make(mount, io):
    made = []

    def build(space=1 << 20, io=io, **options):
        found = read_journal(mount, IDENTITY, io)
        journal = Journal(
            mount, IDENTITY, io, Space(space), SETTINGS, cap_bytes=1 << 20, old=found.old,
            number=found.number, **options,
        )  # fmt: skip
        made.append(journal)
        return journal

    yield build
    for one in made:
        one.close()
