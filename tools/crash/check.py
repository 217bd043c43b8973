"""After a cut: does the agent start, keep its promises and its cap, and serve no wrong byte?"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from kvtier_agent.cache.moves import MoveStatus
from kvtier_agent.cache.record import NO_SLOT, as_bytes_keys
from kvtier_agent.cache.settings import Behaviour, Budgets, Durability
from kvtier_agent.storage.core import Core
from kvtier_agent.storage.fileio import FileIO
from kvtier_agent.storage.l2 import L2
from kvtier_agent.storage.segment import HEADER

from crash.disk import CUTTABLE, Change, Cutter, RecordingIO
from crash.rings import RecordingRings
from crash.workload import (
    DOMAIN,
    GEOMETRY,
    PAGE,
    Released,
    Settings,
    Stored,
    Workload,
    core_settings,
    page_of,
)


@dataclass(slots=True)
class Tally:
    """What was seen at all cuts."""

    cuts: int = 0
    pages_read: int = 0
    pages_right: int = 0
    wrong_bytes: int = 0
    misses: int = 0
    """Pages found that failed verification: not served."""
    unwritten: int = 0
    """Of those, pages that never reached their slots."""
    misjudged: int = 0
    """Unwritten pages that were taken for bad ones (a sound segment is suspect then), or the other
    way round."""
    promised: int = 0
    promises_broken: int = 0
    cap_broken: int = 0
    starts_failed: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def bad(self) -> int:
        broken = self.promises_broken + self.cap_broken + self.starts_failed
        return self.wrong_bytes + self.misjudged + broken

    def problem(self, text: str) -> None:
        if len(self.problems) < 20:
            self.problems.append(text)


class Promises:
    """What must survive a power cut, as the notes of a trace say."""

    def __init__(self) -> None:
        self.settings = Settings(0, "none")
        self.keys: set[bytes] = set()

    def hear(self, change: Change) -> None:
        note = change.note
        if isinstance(note, Settings):
            # A tier that shrinks may give up any page at the next start; one that is not `sync` any
            # more moves pages (compaction) without flushing them.
            if note.durability != "sync" or note.cap_bytes < self.settings.cap_bytes:
                self.keys.clear()
            self.settings = note
        elif isinstance(note, Stored) and self.settings.durability == "sync":
            self.keys |= note.keys
        elif isinstance(note, Released):
            self.keys -= note.keys


def folder_of(root: Path) -> Path:
    return root / "data0" / "kvtier" / DOMAIN


def record(root: Path, seed: int, steps: int, *, rings: bool = False) -> list[Change]:
    """The trace of one workload, whose pages go by rings or by calls."""
    io = RecordingRings(folder_of(root), seed) if rings else RecordingIO(folder_of(root))
    Workload(root, io, seed, steps).run()
    return io.trace


def cut_everywhere(
    trace: list[Change],
    root: Path,
    seed: int,
    tally: Tally,
    *,
    every: int = 1,
    again: float = 0.1,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Cut before each change (each `every`-th), start an agent on what is left, look at all of it.
    A share `again` of the recoveries is cut in turn."""
    cutter, promises = Cutter(trace), Promises()
    chance = random.Random(seed)
    while cutter.at < len(trace):
        if trace[cutter.at].what in CUTTABLE and chance.randrange(every) == 0:
            folder = empty_folder(root)
            cutter.cut(chance, folder)
            twice = chance.random() < again
            io = RecordingIO(folder) if twice else FileIO()
            begun = len(io.trace) if isinstance(io, RecordingIO) else 0
            where = f"seed {seed}, change {cutter.at}"
            start(root, io, promises.settings, promises.keys, tally, where)
            if isinstance(io, RecordingIO):
                second = Cutter(io.trace)
                stop = chance.randrange(begun, len(io.trace) + 1)
                while second.at < stop:
                    second.forward()
                second.cut(chance, empty_folder(root))
                where += f", and change {stop} of the recovery"
                start(root, FileIO(), promises.settings, promises.keys, tally, where)
            progress()
        promises.hear(cutter.forward())


def start(
    root: Path, io: FileIO, settings: Settings, promised: set[bytes], tally: Tally, where: str
) -> None:
    """Start an agent on `root` and judge what it found."""
    tally.cuts += 1
    durability: Durability = "async" if settings.durability == "none" else settings.durability
    core = Core(core_settings(root), io=io)
    try:
        behaviour = Behaviour(durability=durability)
        core.reconfigure(1.0, behaviour, Budgets(0, 0, settings.cap_bytes, ("data0",), 0))
        core.register(1.0, GEOMETRY)
        _judge(core, root, settings, promised, tally, where)
    except Exception as error:
        tally.starts_failed += 1
        tally.problem(f"{where}: the agent does not start: {type(error).__name__}: {error}")
    finally:
        core.close()


def _judge(
    core: Core, root: Path, settings: Settings, promised: set[bytes], tally: Tally, where: str
) -> None:
    held = sum(p.stat().st_blocks * 512 for p in folder_of(root).glob("*-*.*"))
    if held > settings.cap_bytes:
        tally.cap_broken += 1
        tally.problem(f"{where}: {held} bytes, the cap is {settings.cap_bytes}")
    table, l2 = core.cache.table, core.nvme.l2
    assert l2 is not None
    rows = table.live_rows()
    rows = rows[table.l2_slot[rows] != NO_SLOT]
    keys = as_bytes_keys(table.key[rows])
    arena = _ARENA[: len(rows)]
    into = np.arange(len(rows), dtype=np.uint32)
    right: set[bytes] = set()
    status: np.ndarray[Any, Any] = into  # of none
    if len(rows):
        status, _ = l2.read(table.l2_slot[rows], keys, table.checksum[rows], arena, into)
    for i, key in enumerate(key.tobytes() for key in keys):
        if status[i] != MoveStatus.OK:
            tally.misses += 1
            unwritten = status[i] == MoveStatus.UNWRITTEN
            tally.unwritten += int(unwritten)
            slot = int(table.l2_slot[rows[i]])
            if l2.durability == "async" and unwritten == _landed(l2, slot, key):
                tally.misjudged += 1
                tally.problem(f"{where}: page {key[:4].hex()} is misjudged")
        elif (arena[i] == page_of(key)).all():
            right.add(key)
        else:
            tally.wrong_bytes += 1
            tally.problem(f"{where}: wrong bytes for page {key[:4].hex()}")
    tally.pages_read += len(keys)
    tally.pages_right += len(right)
    tally.promised += len(promised)
    if lost := promised - right:
        tally.promises_broken += len(lost)
        there = {key.tobytes() for key in keys}
        how = sorted(f"{k[:4].hex()} {'bad' if k in there else 'not found'}" for k in lost)
        tally.problem(f"{where}: stored under sync and lost: {', '.join(how[:4])}")


def _landed(l2: L2, slot: int, key: bytes) -> bool:
    """Does the slot have the header of this page, in this use of its segment?"""
    number, first = divmod(slot, l2.per_segment)
    segment, _ = l2.segments[number]
    with segment.path.open("rb") as file:
        file.seek(first * l2.stride)
        header = np.frombuffer(file.read(HEADER.itemsize), dtype=HEADER)[0]
    return bytes(header["key"]) == key and int(header["generation"]) == segment.use[1]


def empty_folder(root: Path) -> Path:
    """The folder of the domain on the volume of `root`, with nothing in it."""
    folder = folder_of(root)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)
    (root / "arena").mkdir(exist_ok=True)
    return folder


def _aligned(count: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    flat = np.zeros((count + 1) * PAGE, dtype=np.uint8)
    begin = -flat.ctypes.data % PAGE
    return flat[begin : begin + count * PAGE].reshape(count, PAGE)


_ARENA = _aligned(1024)
