"""Pages between L1 and NVMe by io_uring: many batches under way, and no thread waits for any.

    launch     a move becomes transfers, one a page (header and payload; of a layered read one a
               unit), from or to its slot of the arena, and is given to the rings of the volumes it
               lies on
    the drive  reads before writes, bytes in flight bounded per drive: that is the ring's affair
    finish     the last of its transfers has ended: pages are verified (reads) or the journal is
               told (writes), and the outcome is delivered

Until then its slots stay taken, whatever became of the others. What a drive hangs on is not
finished: the load that waits for it has its deadline, at which its pages are misses. When a drive
has left transfers of a kind (reads, writes) unanswered for `HANG_SECONDS`, what waits for it is
called back where it was not begun, and its volume counts as failing.

`launch` says False where a move cannot go this way: there is no room for its headers, or none in
the ring for a file. Calls of preadv and pwritev do the same then. A read for whose headers there is
no room yet waits (`read_line`).

The loop `run` reaps. Reads are finished there; what may wait for a drive once more (writes, for the
journal; what the ring sent back) by a thread of the mover (`later`).
"""

from __future__ import annotations

import errno
import functools
import threading
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import structlog

from kvtier_agent.cache.arena import ShmArena
from kvtier_agent.cache.moves import Move, MoveKind, MoveStatus, Outcome
from kvtier_agent.storage.batches import neighbours
from kvtier_agent.storage.drive_ring import DriveRing
from kvtier_agent.storage.fileio import FileIO, NoAnswerError
from kvtier_agent.storage.flight import Flight
from kvtier_agent.storage.l2 import L2
from kvtier_agent.storage.page_write import PageWrite
from kvtier_agent.storage.read_line import ReadLine
from kvtier_agent.storage.rings import Rings
from kvtier_agent.storage.segment import PageStamp, Segment, SegmentGoneError
from kvtier_agent.storage.settings import CoreSettings
from kvtier_agent.storage.trays import Tray, Trays
from kvtier_agent.storage.unit_flight import UnitFlight
from kvtier_agent.storage.units import Announce
from kvtier_agent.storage.volume import Volume
from kvtier_agent.supervise import Heart

HANG_SECONDS = 30.0
"""A drive that leaves a transfer unanswered for so long hangs."""
STALL_SECONDS = 10.0
"""A drive that leaves a transfer unanswered for so long gets no more writes meanwhile, and no more
reads where it answers none: they would pile up behind it, and each holds a slot of L1."""
BEAT_SECONDS = 0.5
AT_ONCE = 2
"""Reads that the loop verifies itself; when more of them ended together, others do the rest, and
layered ones, which are large: the loop is to tell of others meanwhile."""
PAGE_BITS = np.uint64(24)
"""Of a tag, for the transfer's number in its batch; the rest names the batch."""

log = structlog.get_logger("kvtier.storage.ring")


class Later(Protocol):
    """See `Mover.later`."""

    def __call__(self, call: Callable[[], None], *, waits: bool) -> None: ...


def _at_once(call: Callable[[], None], *, waits: bool) -> None:
    call()


class Flights:
    """The rings of one trust domain, over its arena of L1. Thread-safe."""

    def __init__(
        self,
        io: FileIO,
        arena: ShmArena,
        l2: Callable[[], L2 | None],
        *,
        move_bytes: int,
        in_flight_bytes: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`l2`: the one in use; `move_bytes`: of a move (a single page may be larger);
        `in_flight_bytes`: per drive; `clock`: seconds. Raises OSError where there is no
        io_uring."""
        self.deliver: Callable[[Move, Outcome], None] = lambda *_: None
        """Called with each move that ended, on the thread that finished it."""
        self.later: Later = _at_once
        """Has something done by another thread; see `Mover.later`."""
        self.announce: Announce = lambda *_: None
        """Told of units that have landed of a layered move."""
        self.by_calls: Callable[[Move], None] = lambda move: self._cancel(move)
        """Has a read that waited here done by calls; see `Mover.by_calls`."""
        self._io, self._arena, self._l2, self._clock = io, arena, l2, clock
        self._trays = Trays(move_bytes)
        self._rings = Rings(io, arena, self._trays.memory, in_flight_bytes)
        self._line = ReadLine(self._trays, self._mute, self._cancel)
        self._lock = threading.Lock()
        self._flights: dict[int, Flight] = {}
        self._next = 1
        self._closed = False
        self._next_look = 0.0

    # -- launch -----------------------------------------------------------------------------

    def launch(self, move: Move, *, patient: bool) -> bool:
        """Begin a move, if it can go this way; it is delivered then. `patient`: the caller may wait
        a moment for a ring to be made (the cache thread may not)."""
        l2 = self._l2()
        if self._closed or l2 is None or move.kind not in (MoveKind.READ, MoveKind.WRITE):
            return False
        reads = move.kind is MoveKind.READ
        tray = None
        if not (reads and self._line):  # not before those that wait for one
            tray = self._trays.take(l2.geometry, len(move), last=reads)
        if tray is not None:
            return self._begin(l2, move, tray, patient)
        if not reads or not self._line.take(move, l2):
            return False
        self._rings.stir()  # a tray may have come back in this moment
        return True

    def _begin(self, l2: L2, move: Move, tray: Tray, patient: bool) -> bool:
        """As `launch`, with a tray, which is given back in any case."""
        reads = move.kind is MoveKind.READ
        flight = (UnitFlight if move.layered else Flight)(move, l2, tray, self._clock())
        ready = False
        try:
            ready = self._plan_read(flight, patient) if reads else self._plan_write(flight, patient)
        finally:
            if not ready:
                self._put_down(flight)
        if ready:
            self._submit(flight)
        return ready

    def _plan_read(self, flight: Flight, patient: bool) -> bool:
        l2, move = flight.l2, flight.move
        everything = np.ones(len(move), dtype=bool)
        for where, number, first in neighbours(move.source, everything, l2.per_segment):
            held = l2.segments.get(number)
            try:
                if held is None:
                    raise SegmentGoneError(errno.ENOENT, "the segment is gone")
                if not self._join(flight, where, *held, first, patient):
                    return False
            except SegmentGoneError as error:
                flight.fail(where, MoveStatus.IO_ERROR, f"read: {error.strerror}")
            except OSError as error:  # the pages stay where they are, for another time
                flight.fail(where, MoveStatus.CANCELLED, f"read: {error.strerror}")
        return True

    def _plan_write(self, flight: Flight, patient: bool) -> bool:
        l2, move = flight.l2, flight.move
        stamp = PageStamp(move.keys, move.parents, move.depths, move.checksums, move.tenants)
        arena, uses = self._arena.rows(move.slot_bytes), (move.epochs, move.sizes)
        headers = flight.tray.headers
        writing = PageWrite(l2, move.target, stamp, arena, move.source, uses, headers)
        flight.writing = writing
        for run in writing.runs():
            try:
                if not self._join(flight, run.where, run.segment, run.volume, run.first, patient):
                    return False
                flight.runs.append(run)
            except OSError as error:
                writing.settle(run, error)
        return True

    def _join(
        self,
        flight: Flight,
        where: np.ndarray,
        segment: Segment,
        volume: Volume,
        first: int,
        patient: bool,
    ) -> bool:
        """These pages of a flight go to or come from this segment, which stays open until it ends.
        False: they cannot. Raises SegmentGoneError, and OSError where the drive does not answer."""
        drive = self._rings.of(volume, patient=patient)
        if drive is None:
            return False
        if drive.mute if flight.writing is None else drive.stalls:
            raise NoAnswerError(waited=False)
        segment.enter()
        file = drive.file_of(segment)
        if file is None:
            segment.leave()
            return False
        flight.add(where, segment, first, drive, file)
        return True

    def _submit(self, flight: Flight) -> None:
        with self._lock:
            number, self._next = self._next, self._next + 1
            flight.left = flight.numbers().size
            flight.submitted = self._clock()
            if flight.left:
                self._flights[number] = flight
        flight.fill(np.uint64(number) << PAGE_BITS)
        if not flight.left:
            self._finish(flight)
            return
        for drive, which in flight.batches():
            part = flight.transfers(which)
            with self._lock:
                drive.expect(which.size, self._clock())
            error = drive.submit(part)
            if error is not None:
                with self._lock:
                    drive.ended(which.size, self._clock())
                    over = flight.ended(which, -(error.errno or 0))
                    if over:
                        del self._flights[number]
                if over:
                    self.later(lambda: self._finish(flight), waits=True)

    # -- reap and finish --------------------------------------------------------------------

    def run(self, heart: Heart) -> None:
        """The loop: until `heart.stopping`."""
        while not heart.stopping.is_set():
            heart.beat()
            self.round(BEAT_SECONDS)

    def round(self, longest_seconds: float) -> None:
        """Wait for something that ended, and finish it; then what is to be done now and then."""
        over: list[Flight] = []
        for drive in self._rings.wait(longest_seconds):
            over += self._collect(drive)
        mine: list[Flight] = []
        for flight in over:
            if len(mine) < AT_ONCE and flight.light and not flight.move.layered:
                mine.append(flight)
            else:
                self.later(functools.partial(self._finish, flight), waits=not flight.light)
        for flight in mine:
            self._finish(flight)
        l2 = self._l2()
        if self._line and l2 is not None:
            self._line.go(l2, self._begin_late, self.by_calls)
        now = self._clock()
        if now >= self._next_look:
            self._next_look = now + 1.0
            self._look(now)

    def _collect(self, drive: DriveRing) -> list[Flight]:
        """Flights whose last transfer has ended."""
        done = drive.collect()
        over: list[Flight] = []
        heard: list[Flight] = []
        if not done.size:
            return over
        numbers = done["tag"] >> PAGE_BITS
        which = (done["tag"] & ((np.uint64(1) << PAGE_BITS) - np.uint64(1))).astype(np.intp)
        now = self._clock()
        with self._lock:
            before = drive.ended(done.size, now)
            for number in np.unique(numbers).tolist():
                mine = numbers == number
                flight = self._flights[number]
                if (done["result"][mine] != -errno.ECANCELED).any():  # to call back is no answer
                    drive.answered[flight.move.kind] = now
                if flight.move.layered:
                    heard.append(flight)
                if flight.ended(which[mine], done["result"][mine]):
                    # On a drive that is never idle, what it took since it ended the one before.
                    flight.seconds = now - max(flight.started, before)
                    del self._flights[number]
                    over.append(flight)
        for flight in heard:
            news = flight.news(self._arena.rows(flight.move.slot_bytes))
            if news is not None:
                self.announce(flight.move, news)
        return over

    def _finish(self, flight: Flight) -> None:
        """Whatever happens, its slots are free and it is delivered."""
        move = flight.move
        outcome = Outcome.uniform(move, MoveStatus.IO_ERROR, flight.seconds, "its thread died")
        try:
            status, error = flight.outcome(self._arena.rows(move.slot_bytes), self._io)
            outcome = Outcome(status, flight.seconds, error)
        except Exception as problem:  # the loop must not die; the pages are simply not moved
            error = f"{move.kind.value}: {problem}"
            outcome = Outcome.uniform(move, MoveStatus.IO_ERROR, flight.seconds, error)
        finally:
            self._put_down(flight)
            self.deliver(move, outcome)

    def _put_down(self, flight: Flight) -> None:
        flight.leave()
        self._trays.give(flight.tray)
        if self._line:
            self._rings.stir()

    def _begin_late(self, l2: L2, move: Move, tray: Tray) -> bool:
        """`_begin` for one that waited; the loop must not die."""
        try:
            return self._begin(l2, move, tray, patient=False)
        except Exception as error:  # it can still go the other way
            log.warning("a move was not begun", move=move.kind.value, error=str(error))
            return False

    def _cancel(self, move: Move) -> None:
        error = "read: the drive does not answer"
        self.deliver(move, Outcome.uniform(move, MoveStatus.CANCELLED, error=error))

    def _mute(self) -> set[str]:
        return {drive.volume.name for drive in self._rings.all() if drive.mute}

    # -- now and then -----------------------------------------------------------------------

    def _look(self, now: float) -> None:
        l2 = self._l2()
        for drive in self._rings.all():
            silent, reads = self._silent(drive, now)
            drive.stalls, drive.mute = silent > STALL_SECONDS, reads > STALL_SECONDS
            if drive.hangs(silent, now, HANG_SECONDS):
                self._call_back(drive, now)
            if l2 is not None and self._rings.pin_more(drive, l2.slot_bytes):
                self._next_look = 0.0  # the next piece in the next round: others want to go on
                self._rings.stir()

    def _silent(self, drive: DriveRing, now: float) -> tuple[float, float]:
        """Seconds for which a drive has been silent to those that wait for it, and for which it has
        answered no read; 0: nobody waits."""
        with self._lock:
            held = [
                (f.move.kind, f.submitted) for f in self._flights.values() if f.waits_for(drive)
            ]
            reads = [each for each in held if each[0] is MoveKind.READ]
            return (
                max((drive.silent(*each, now) for each in held), default=0.0),
                max((drive.unanswered(*each, now) for each in reads), default=0.0),
            )

    def _call_back(self, drive: DriveRing, now: float) -> None:
        """What a drive that hangs has not begun ends now; the rest when the drive says so. Reads
        that go on while writes hang, or the other way round, are left alone."""
        log.warning(
            "a drive leaves transfers unanswered", volume=drive.volume.name,
            seconds=HANG_SECONDS, transfers=drive.waiting,
        )  # fmt: skip
        with self._lock:
            drive.said = now
            held = [(n, f) for n, f in self._flights.items() if f.waits_for(drive)]
            waits = [(f.move.kind, f.submitted) for _, f in held]
            hung = {each[0] for each in waits if drive.silent(*each, now) > HANG_SECONDS}
            held = [(n, f) for n, f in held if f.move.kind in hung]
        for number, flight in held:
            which = flight.numbers().astype(np.uint64)
            drive.cancel((np.uint64(number) << PAGE_BITS) | which)
        for l2 in {id(flight.l2): flight.l2 for _, flight in held}.values():
            l2.hangs(drive.volume)

    def close(self, seconds: float) -> None:
        """Call everything back and wait for what the drives have begun, at most so long."""
        self._closed = True
        self._line.end()
        end = self._clock() + seconds
        for drive in self._rings.all():
            left = drive.ring.close(max(0.0, end - self._clock()))
            for flight in self._collect(drive):
                self._finish(flight)
            if left:
                log.warning(
                    "a drive still has transfers of this process",
                    volume=drive.volume.name, transfers=left,
                )  # fmt: skip


def flights_if_any(
    io: FileIO, arena: ShmArena, l2: Callable[[], L2 | None], settings: CoreSettings
) -> Flights | None:
    """Flights where there is io_uring; the log says which of the two ways is used."""
    try:
        made = Flights(
            io,
            arena,
            l2,
            move_bytes=settings.cache.move_bytes,
            in_flight_bytes=settings.nvme_in_flight_bytes,
        )
    except OSError as error:
        log.info(
            "pages go to NVMe by preadv and pwritev",
            domain=settings.domain, why_not_io_uring=error.strerror,
        )  # fmt: skip
        return None
    log.info("pages go to NVMe by io_uring", domain=settings.domain)
    return made
