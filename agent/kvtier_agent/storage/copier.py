"""How each kind of move is carried out. What goes wrong is an `Outcome`, never an exception."""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.moves import Move, MoveKind, MoveStatus, Outcome
from kvtier_agent.storage.l2 import L2
from kvtier_agent.storage.segment import PageStamp
from kvtier_agent.storage.units import Announce, read_in_order

SCRATCH_BYTES = 1 << 20

Rows = NDArray[np.uint8]


class Memory(Protocol):
    """An arena as the copier sees it: `ShmArena` or `CudaArena`."""

    kind: str

    def punch(self, slots: NDArray[np.uint32], slot_bytes: int) -> None: ...


class Copier:
    """Executes moves; safe to use from several threads. Arenas and L2 may be set later."""

    def __init__(self) -> None:
        self.l0: Any = None
        self.l1: Any = None
        self.l2: L2 | None = None
        self.announce: Announce = lambda *_: None
        self._local = threading.local()

    def execute(self, move: Move) -> Outcome:
        """Carry out one move, whatever happens."""
        start = time.perf_counter()
        try:
            status, error = self._execute(move)
        except Exception as problem:  # a mover must not die; the page is simply not moved
            failed = Outcome.uniform(move, MoveStatus.IO_ERROR)
            status, error = failed.status, f"{move.kind.value}: {problem}"
        return Outcome(status, time.perf_counter() - start, error)

    def _execute(self, move: Move) -> tuple[NDArray[np.uint8], str]:
        kind = move.kind
        done = np.full(len(move), MoveStatus.OK, dtype=np.uint8)
        if kind is MoveKind.DEMOTE or kind is MoveKind.PROMOTE:
            self._copy(move)
            return done, ""
        if kind is MoveKind.PUNCH_L0 or kind is MoveKind.PUNCH_L1:
            arena = self.l0 if kind is MoveKind.PUNCH_L0 else self.l1
            arena.punch(move.source, move.slot_bytes)
            return done, ""
        l2 = self.l2
        if l2 is None:
            cancelled = Outcome.uniform(move, MoveStatus.CANCELLED)
            return cancelled.status, "there is no NVMe tier"
        uses = (move.epochs, move.sizes)
        stamp = PageStamp(move.keys, move.parents, move.depths, move.checksums, move.tenants)
        if kind is MoveKind.WRITE:
            return l2.write(move.target, stamp, self.l1.rows(move.slot_bytes), move.source, uses)
        if kind is MoveKind.COMPACT:
            return l2.compact(move.source, move.target, stamp, uses)
        if kind is MoveKind.READ:
            arena = self.l1.rows(move.slot_bytes)
            if move.layered:
                return read_in_order(l2, move, arena, self.announce)
            return l2.read(move.source, move.keys, move.checksums, arena, move.target)
        if kind is MoveKind.SCRUB:
            return l2.scrub(move.source, uses), ""
        if kind is MoveKind.FORGET:
            l2.forget(move.source, move.epochs)
        else:
            l2.give_back(move.source)
        return done, ""

    def _copy(self, move: Move) -> None:
        """Arena to arena, through a scratch block that stays in the processor's cache."""
        down = move.kind is MoveKind.DEMOTE
        source, target = (self.l0, self.l1) if down else (self.l1, self.l0)
        step = max(1, SCRATCH_BYTES // move.slot_bytes)
        for start in range(0, len(move), step):
            here = move.source[start : start + step]
            there = move.target[start : start + step]
            block = self._scratch(step, move.slot_bytes)[: len(here)]
            if source.kind == "cuda":
                source.gather(here, block)
            else:
                rows = source.rows(move.slot_bytes)
                np.take(rows, here, axis=0, out=block, mode="clip")
            if target.kind == "cuda":
                target.scatter(there, block)
            else:
                target.rows(move.slot_bytes)[there] = block

    def _scratch(self, count: int, slot_bytes: int) -> Rows:
        held: Rows | None = getattr(self._local, "scratch", None)
        if held is None or held.shape != (count, slot_bytes):
            held = self._local.scratch = np.empty((count, slot_bytes), dtype=np.uint8)
        return held
