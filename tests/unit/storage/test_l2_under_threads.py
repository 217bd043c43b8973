"""Threads that write, read, give up and scrub while volumes leave and calls fail: what a read calls
good is good, the cap holds, and no file stays open."""

import contextlib
import errno
import mmap
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import xxhash
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.moves import MoveStatus
from kvtier_agent.storage import l2 as l2_module
from kvtier_agent.storage import removal
from kvtier_agent.storage.fileio import FileIO
from kvtier_agent.storage.l2 import L2
from kvtier_agent.storage.segment import PageStamp
from kvtier_agent.storage.volume import Volume

PAGE = 8192
GEOMETRY = Geometry.of_page_bytes(PAGE, 16)
SOURCES = 64
THREADS = 4
SLOTS = 80


class UnreliableIO(FileIO):
    """One call in a hundred fails."""

    def __init__(self, seed):
        self._dice = random.Random(seed)

    def _roll(self):
        if self._dice.random() < 0.01:
            raise OSError(self._dice.choice([errno.EIO, errno.ENOSPC, errno.EROFS]), "injected")

    def write(self, fd, buffers, offset):
        self._roll()
        return super().write(fd, buffers, offset)

    def read(self, fd, buffers, offset):
        self._roll()
        return super().read(fd, buffers, offset)

    def allocate(self, fd, offset, length):
        self._roll()
        super().allocate(fd, offset, length)


class Worker(threading.Thread):
    """Uses slots of its own, which lie in all segments, like a mover whose pages are its own."""

    def __init__(self, number, seed, l2, volumes, arena, keys, sums):
        super().__init__()
        self.dice = random.Random(seed * THREADS + number)
        self.leader = number == 0
        self.l2, self.volumes, self.arena, self.keys, self.sums = l2, volumes, arena, keys, sums
        self.slots = range(number, SLOTS, THREADS)
        self.base = SOURCES + number * 8
        self.held = {}
        self.good = 0
        self.problem = None

    def run(self):
        try:
            for _ in range(400):
                self.step()
        except Exception as problem:
            self.problem = problem

    def step(self):
        slots = sorted(self.dice.sample(self.slots, self.dice.randint(1, 6)))
        act = self.dice.choices(
            [self.write, self.read, self.forgotten, self.scrub, self.volume_leaves],
            [40, 40, 10, 5, 1],
        )[0]
        act(slots)

    def write(self, slots):
        rows = np.array([self.dice.randrange(SOURCES) for _ in slots], np.uint32)
        stamp = PageStamp(self.keys[rows], self.keys[rows], rows * 16, self.sums[rows])
        status, _ = self.l2.write(np.array(slots, np.uint32), stamp, self.arena, rows)
        for slot, row, outcome in zip(slots, rows.tolist(), status, strict=True):
            self.held.pop(slot, None)
            if outcome == MoveStatus.OK:
                self.held[slot] = row

    def read(self, slots):
        slots = [slot for slot in slots if slot in self.held]
        if not slots:
            return
        rows = np.array([self.held[slot] for slot in slots], np.uint32)
        into = np.arange(self.base, self.base + len(slots), dtype=np.uint32)
        status, _ = self.l2.read(
            np.array(slots, np.uint32), self.keys[rows], self.sums[rows], self.arena, into
        )
        for row, place, outcome in zip(rows, into, status, strict=True):
            if outcome == MoveStatus.OK:
                assert (self.arena[place] == self.arena[row]).all()
                self.good += 1

    def forgotten(self, slots):
        self.l2.forget(np.array(slots, np.uint32), np.zeros(len(slots), np.uint32))
        self.forget(slots)

    def scrub(self, slots):
        self.l2.scrub(np.array(slots, np.uint32))
        self.forget(slots)

    def forget(self, slots):
        for slot in slots:
            self.held.pop(slot, None)

    def volume_leaves(self, _):
        if self.leader:
            volume = self.dice.choice(self.volumes)
            self.l2.withdraw({volume.name})
            self.l2.add(volume)


@pytest.mark.parametrize("patience", [removal.PATIENCE_SECONDS, 0.0])
@pytest.mark.parametrize("seed", range(3))
def test_what_a_read_calls_good_is_good_whatever_else_goes_on(mount, monkeypatch, seed, patience):
    monkeypatch.setattr(removal, "PATIENCE_SECONDS", patience)
    monkeypatch.setattr(l2_module, "slots_per_segment", lambda stride: 12)
    io = UnreliableIO(seed)
    volumes = []
    for name in ("data0", "data1"):
        (mount / name).mkdir()
        volumes.append(Volume(name, mount / name, "d", allow_root_filesystem=True, io=io))
    l2 = L2(list(volumes), GEOMETRY, io=io)
    l2.limit(60 * l2.stride + 65536, 0, "sync" if seed else "async")
    rows = SOURCES + 8 * THREADS
    arena = np.frombuffer(mmap.mmap(-1, rows * PAGE), np.uint8).reshape(rows, PAGE)
    for i in range(SOURCES):
        arena[i] = np.random.default_rng(i).integers(0, 256, PAGE, dtype=np.uint8)
    keys = np.random.default_rng(seed).integers(0, 256, (SOURCES, 16), dtype=np.uint8)
    sums = np.array([xxhash.xxh3_64_intdigest(row) for row in arena[:SOURCES]], np.uint64)
    workers = [Worker(n, seed, l2, volumes, arena, keys, sums) for n in range(THREADS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.problem for worker in workers] == [None] * THREADS
    for thread in threading.enumerate():
        if thread.name == "volume-leaves":  # files of a volume that left go by and by
            thread.join(120)
    assert sum(worker.good for worker in workers) > 100
    real = sum(file.stat().st_blocks * 512 for file in mount.rglob("*-*.*"))
    assert real == l2.allocated_bytes <= l2.cap_bytes
    l2.close()
    for volume in volumes:
        volume.close()
    assert not [name for name in open_files() if name.startswith(str(mount))]


def open_files():
    names = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists the folder is gone by now
            names.append(str(link.readlink()))
    return names
