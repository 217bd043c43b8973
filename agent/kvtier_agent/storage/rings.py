"""The rings of one trust domain over its arena of L1, one a volume, made when first wanted."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable
from typing import Any

import structlog

from kvtier_agent.cache.arena import ShmArena
from kvtier_agent.storage.drive_ring import DriveRing
from kvtier_agent.storage.fileio import FileIO
from kvtier_agent.storage.ring_probe import probe
from kvtier_agent.storage.segment import HEADER_BYTES
from kvtier_agent.storage.volume import Volume

TRANSFERS = 128
"""Transfers that the kernel has at a time, per drive."""
QUEUED = 1 << 20
"""Transfers that may wait for their turn, per drive."""
MOST_FILES = 1 << 16

log = structlog.get_logger("kvtier.storage.ring")


class Rings:
    """Thread-safe; `wait` for one thread at a time."""

    def __init__(self, io: FileIO, arena: ShmArena, headers: Any, in_flight_bytes: int) -> None:
        """`headers`: a buffer beside the arena; `in_flight_bytes`: per drive. Raises OSError where
        there is no io_uring."""
        trial = io.ring(bytearray(HEADER_BYTES))
        try:
            probe(trial, HEADER_BYTES)
        finally:
            trial.close(1.0)
        self._io, self._arena, self._headers = io, arena, headers
        self._in_flight_bytes = in_flight_bytes
        self._drives: dict[str, DriveRing | None] = {}
        self._by_fd: dict[int, DriveRing] = {}
        self._given_up: set[str] = set()
        self._making = threading.Lock()
        self._poll = select.poll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._wake, select.POLLIN)
        self._backed = arena.backed_prefix
        arena.on_backed = self._telling(arena.on_backed)

    def _telling(self, others: Callable[[int], None]) -> Callable[[int], None]:
        """Memory of the arena is about to be given back, or has come to it: `ShmArena.on_backed`.
        The kernel lets go of it before."""

        def backed(length: int) -> None:
            others(length)
            self._backed = length
            for drive in self.all():
                drive.unpin_from(length)

        return backed

    def of(self, volume: Volume, *, patient: bool) -> DriveRing | None:
        """The ring of a volume. None: it has none, or none yet and the caller is not `patient`."""
        drive = self._drives.get(volume.name)
        if drive is not None:
            drive.volume = volume
            if drive.broken:
                self._give_up(volume.name)
                return None
            return drive
        if not patient or volume.name in self._drives:
            return None
        with self._making:
            if volume.name not in self._drives:
                self._drives[volume.name] = self._make(volume)
        return self.of(volume, patient=False)

    def _give_up(self, name: str) -> None:
        """What is under way may still arrive, so the ring stays; nothing more is asked of it."""
        with self._making:
            if self._drives[name] is not None and name not in self._given_up:
                self._given_up.add(name)
                log.warning("the ring of a volume broke; preadv and pwritev are used", volume=name)

    def _make(self, volume: Volume) -> DriveRing | None:
        try:
            ring = self._io.ring(
                self._arena.bytes,
                self._headers,
                depth=TRANSFERS,
                in_flight_bytes=self._in_flight_bytes,
                files=min(MOST_FILES, os.sysconf("SC_OPEN_MAX")),
                queue=QUEUED,
            )
        except OSError as error:
            log.warning(
                "no ring for a volume; preadv and pwritev are used",
                volume=volume.name, error=error.strerror,
            )  # fmt: skip
            return None
        drive = DriveRing(volume, ring)
        self._by_fd[ring.fileno()] = drive
        self._poll.register(ring.fileno(), select.POLLIN)
        self.stir()  # whoever waits now does not know of it
        return drive

    def all(self) -> list[DriveRing]:
        """Those that there are."""
        return [drive for drive in list(self._drives.values()) if drive is not None]

    def wait(self, seconds: float) -> list[DriveRing]:
        """Rings with something to collect, at the latest after so long, or none."""
        ready = []
        for descriptor, _ in self._poll.poll(seconds * 1000):
            drive = self._by_fd.get(descriptor)
            if drive is not None:
                ready.append(drive)
            else:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
        return ready

    def stir(self) -> None:
        """End the `wait` of another thread, or the next one."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._wake, 1)

    def pin_more(self, drive: DriveRing, slot_bytes: int) -> bool:
        """Register one more piece of the arena's memory, cut into slots of this size; False where
        all of it is."""
        return drive.pin_more(lambda: self._backed, slot_bytes)
