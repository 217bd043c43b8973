"""Pages of the workload go the way that production takes, by rings: what `storage.flights` does
between transfers, journal and slots is cut as well.

The ring here makes each transfer by a call of the recorder. Transfers of several batches are under
way at a time and end in any order; the kernel promises none.
"""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
from kvtier_agent.cache.moves import Move, Outcome
from kvtier_agent.native import COMPLETION, READ, TRANSFER_COLUMNS
from kvtier_agent.storage.core import Core
from kvtier_agent.storage.flights import Flights
from kvtier_agent.storage.mover import Done, SyncMover

from crash.disk import RecordingIO


class RecordingRings(RecordingIO):
    """A `RecordingIO` that has rings. `seed`: of the order in which transfers end."""

    def __init__(self, folder: Any, seed: int) -> None:
        super().__init__(folder)
        self.chance = random.Random(seed)
        self.transfers = 0
        """Of pages, by rings."""

    def ring(self, arena: Any, headers: Any = None, **settings: int) -> Any:
        return CallRing(self, arena, headers)


class CallRing:
    """The interface of `kvtier_native.Ring`. What was submitted happens when it is collected."""

    broken = 0

    def __init__(self, io: RecordingRings, arena: Any, headers: Any) -> None:
        self._io = io
        self._arena = memoryview(arena).cast("B")
        self._headers = memoryview(b"" if headers is None else headers).cast("B")
        self._files: dict[int, int] = {}
        self._waiting: list[dict[str, int]] = []
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._event

    def add_file(self, descriptor: int) -> int:
        number = next(i for i in range(len(self._files) + 1) if i not in self._files)
        self._files[number] = descriptor
        return number

    def drop_file(self, number: int) -> None:
        del self._files[number]

    def pin(self, offset: int, length: int) -> int:
        return 0

    def unpin(self, offset: int, length: int) -> None:
        pass

    def cancel(self, tags: Any) -> None:
        pass

    def submit(self, rows: np.ndarray, together: bool = False) -> None:
        self._waiting += [dict(zip(TRANSFER_COLUMNS, row, strict=True)) for row in rows.tolist()]
        os.eventfd_write(self._event, 1)

    def collect(self) -> bytes:
        """Some of what waits, in any order."""
        waiting, chance = self._waiting, self._io.chance
        chance.shuffle(waiting)
        now = [waiting.pop() for _ in range(chance.randint(1, len(waiting)))] if waiting else []
        if not waiting and now:
            os.eventfd_read(self._event)
        done = [(one["tag"], self._transfer(one)) for one in now]
        return np.array(done, COMPLETION).tobytes()

    def _transfer(self, one: dict[str, int]) -> int:
        pieces = [
            self._headers[one["header_offset"] :][: one["header_length"]],
            self._arena[one["offset"] :][: one["length"]],
        ]
        buffers = [piece for piece in pieces if len(piece)]
        call = self._io.read if one["operation"] == READ else self._io.write
        self._io.transfers += len(buffers) > 1
        try:
            return call(self._files[one["file"]], buffers, one["file_offset"])
        except OSError as error:
            return -(error.errno or 0)

    def close(self, seconds: float) -> int:
        if self._event >= 0:
            os.close(self._event)
            self._event = -1
        return len(self._waiting)


class RingMover(SyncMover):
    """Moves of pages to and from NVMe are under way until they are collected; all else is done at
    once, in between."""

    def __init__(self, core: Core) -> None:
        super().__init__(core._copier)
        self._under_way = 0
        settings = core.settings
        self._flights = Flights(
            core.nvme.io, core.memory.l1, lambda: core._copier.l2,
            move_bytes=settings.cache.move_bytes, in_flight_bytes=settings.nvme_in_flight_bytes,
        )  # fmt: skip
        self._flights.deliver = self._deliver
        self._flights.by_calls = lambda move: self._deliver(move, self._copier.execute(move))

    def submit(self, moves: list[Move]) -> None:
        for move in moves:
            self._under_way += 1
            if not self._flights.launch(move, patient=True):
                self._under_way -= 1
                super().submit([move])

    def collect(self) -> Done:
        while self._under_way:
            self._flights.round(1.0)
        return super().collect()

    def close(self) -> None:
        self._flights.close(0.0)

    def _deliver(self, move: Move, outcome: Outcome) -> None:
        self._under_way -= 1
        self._done.append((move, outcome))
