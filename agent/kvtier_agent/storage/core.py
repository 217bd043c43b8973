"""`Core`: one trust domain's cache with its arenas, volumes and mover: the edge where effects are.

The server calls `core.cache` on the cache thread, then `core.pump()`; when the mover's wake-up
fires it calls `core.collect(now)`, which gives finished tickets.

Applying a revision has two halves. `prepare`, on any thread, does what takes time and may fail: it
opens and locks volumes, reads the headers of pages that an earlier process left, and puts memory
behind the arenas. `reconfigure`, on the cache thread, only moves limits. If `prepare` raises,
nothing that is in force has changed.

Slots are made when the first client tells its geometry (`register`). Pages found on the volumes are
taken in then, if they are of that geometry; else the volumes are swept.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache import table_notes
from kvtier_agent.cache.arena import ArenaError, Progress, ShmArena, unseen
from kvtier_agent.cache.arena_cuda import CudaArena
from kvtier_agent.cache.cache import NO_BUDGETS, Cache
from kvtier_agent.cache.geometry import ALIGNMENT, Geometry
from kvtier_agent.cache.identity import KEY_VERSION
from kvtier_agent.cache.moves import Move, MoveKind, Outcome
from kvtier_agent.cache.results import Registration, Ticket
from kvtier_agent.cache.settings import Behaviour, Budgets
from kvtier_agent.cache.table_view import LAYOUT_VERSION
from kvtier_agent.storage.arena_watch import ArenaLoss, ArenaWatch
from kvtier_agent.storage.copier import Copier
from kvtier_agent.storage.fileio import FileIO, RingIO, allow_many_files
from kvtier_agent.storage.flights import Flights, flights_if_any
from kvtier_agent.storage.found_pages import take_in
from kvtier_agent.storage.l2 import L2
from kvtier_agent.storage.mover import Mover, Start, SyncMover, mover_of
from kvtier_agent.storage.nvme import NvmeTier
from kvtier_agent.storage.settings import (
    ArenaInfo,
    CoreError,
    CoreSettings,
    Layout,
    arena_infos,
    as_core_error,
)
from kvtier_agent.storage.shared_memory import SharedMemory
from kvtier_agent.storage.volume import Volume, VolumeError
from kvtier_agent.storage.volume_health import Trouble

__all__ = ["ArenaInfo", "Core", "CoreError", "CoreSettings", "Layout"]

MOST_SUSPECTS_NAMED = 16
REGROW_BYTES = 128 << 20
"""Of each tier that get memory in one turn of the cache thread: a twentieth of a second or so."""
ENGINES = ("io_uring", "calls")
"""What `Core.nvme_engine` may be."""


class Core:
    """See the module's story. `on_outcome(now, move, outcome)` is called for each finished move."""

    def __init__(
        self,
        settings: CoreSettings,
        *,
        wake: Callable[[], None] = lambda: None,
        io: FileIO | None = None,
        start: Start | None = None,
    ) -> None:
        """`start`: `Supervisor.start`, for the mover and checkpoints; without it they run alone.
        `wake`: called on a mover thread when an outcome waits; thread-safe and cheap.
        Raises CoreError when the arena or the table cannot be made."""
        self.settings = settings
        self.boot_id = os.urandom(16)
        self._wake = wake
        self._growing = False
        self.on_outcome: Callable[[float, Move, Outcome], None] = lambda *_: None
        allow_many_files()
        self._preparing = threading.Lock()
        self.nvme = NvmeTier(settings, io or RingIO(), start)
        self._prepared: tuple[Behaviour, Budgets] | None = None
        self.memory = SharedMemory(settings, self.boot_id)
        self.table = self.memory.table
        self._l1 = self.memory.l1
        self._l0: ShmArena | CudaArena | None = self.memory.l0
        self.cache = self.memory.new_cache()
        self._noted_suspects: list[int] = []
        self._arena_watch = ArenaWatch(settings.domain)
        self._copier = Copier()
        self._copier.l0, self._copier.l1 = self._l0, self._l1
        self._flights: Flights | None = None
        self._mover: Mover | SyncMover = SyncMover(self._copier)
        if not settings.synchronous:
            self._flights = flights_if_any(
                self.nvme.io, self._l1, lambda: self._copier.l2, settings
            )
            self._mover = mover_of(settings, self._copier, wake, start, self._flights)

    # -- revisions --------------------------------------------------------------------------

    def prepare(self, behaviour: Behaviour, budgets: Budgets, progress: Progress = unseen) -> None:
        """Any thread, may take minutes: open volumes, put memory behind the arenas.
        Raises CoreError and changes nothing that is in force."""
        with self._preparing:
            opened: dict[str, Volume] = {}
            try:
                # Also where there is no room for a byte now: a volume that may not be used is said
                # at once, not on the day when there is room.
                if budgets.l2_bytes or budgets.volumes:
                    opened = self.nvme.open(budgets)
                self._back_bytes(budgets, progress)
                if budgets.l2_bytes:
                    shape = self.cache.geometry if self.cache.shaped else None
                    self.nvme.find(opened, behaviour, shape, progress)
                    self.nvme.empty(opened, budgets, shape, progress)
            except (VolumeError, ArenaError, CoreError, OSError) as error:
                for volume in opened.values():
                    volume.close()
                raise as_core_error(error) from error
            self._prepared = (behaviour, budgets)
            self.nvme.keep(opened, budgets)

    def reconfigure(self, now: float, behaviour: Behaviour, budgets: Budgets) -> None:
        """Cache thread: put a revision in force (calls `prepare` if that was not done)."""
        if self._prepared != (behaviour, budgets):
            self.prepare(behaviour, budgets)
        self._prepared = None
        cache = self.cache
        if cache.shaped:
            self._need_device(cache.geometry)
            self._back_slots(cache.geometry, budgets)
            try:
                self._change_volumes(now, behaviour, budgets, cache.geometry)
            except (VolumeError, OSError) as error:
                raise as_core_error(error) from error
        else:
            for arena, size in ((self._l0, budgets.l0_bytes), (self._l1, budgets.l1_bytes)):
                if isinstance(arena, ShmArena):
                    arena.keep_first(size)
            self.nvme.leave(budgets.volumes)
        slots = self._limit_l2(behaviour, budgets)
        cache.reconfigure(now, behaviour, budgets, l2_slots=slots, take_in=self._take_in)
        self.memory.name_frozen(cache.shelves.frozen.names)

    def register(self, now: float, geometry: Geometry) -> Registration:
        """Cache thread: a client's geometry; the first one lays out slots and opens L2.
        Raises CoreError when memory or a volume fails just then."""
        if self.cache.shaped:
            self._need_device(self.cache.geometry)
            return self.cache.register(now, geometry)
        try:
            return self._shape(now, geometry)
        except CoreError:
            self._forget_slots()  # the next client's may be of another size
            raise

    def _shape(self, now: float, geometry: Geometry) -> Registration:
        """Make slots for pages of this geometry. Raises CoreError, half way."""
        cache = self.cache
        budgets, behaviour = cache.budgets, cache.behaviour
        self._need_device(geometry)
        try:
            if budgets.l2_bytes:
                self._change_volumes(now, behaviour, budgets, geometry)
        except (VolumeError, ArenaError, OSError) as error:
            raise as_core_error(error) from error
        cache.l2_slots = self._limit_l2(behaviour, budgets)
        cache.geometry = geometry
        for pool, arena in zip(cache.shelves.pools[:2], (self._l0, self._l1), strict=True):
            assert arena is not None
            pool.maximum = arena.size_bytes // geometry.slot_bytes
        self._back_slots(geometry, budgets)
        self.memory.describe(geometry)
        if budgets.l2_bytes:
            answer = cache.register(now, geometry, self._take_in)
        else:  # a revision that wants L2 may be on its way, and takes in what was found
            answer = cache.register(now, geometry)
        self.memory.name_frozen(cache.shelves.frozen.names)
        return answer

    def _need_device(self, geometry: Geometry) -> None:
        """Memory on a device, where L0 is to lie there: made for slots of this size."""
        if self._l0 is not None:
            return
        settings = self.settings
        try:
            arena = CudaArena(settings.device, settings.maximum_l0_bytes, geometry.slot_bytes)
        except ArenaError as error:
            raise as_core_error(error) from error
        self._l0 = self._copier.l0 = arena
        self.cache.shelves.pools[0].maximum = arena.size_bytes // geometry.slot_bytes

    def reshape(self, now: float, geometry: Geometry) -> Registration:
        """Cache thread: the engines of the geometry in use are gone, and one of another has come.
        Every page is dropped and the tiers are laid out anew, a cold start. Raises CoreError while
        pages are still on their way (the next try may find them landed), or as `register`."""
        before = self.cache
        before.drop_all(now)
        if before.traffic.in_flight or before.traffic.moves or self.table.pages:
            raise CoreError(
                "pages of the model before are still on their way between tiers; try again"
            )
        self.cache = Cache(self.table, settings=self.settings.cache)
        self.cache.succeed(before)
        self._forget_slots()
        return self.register(now, geometry)

    def _forget_slots(self) -> None:
        """The arenas as they were before the first geometry; no page lies in them."""
        for arena in (self._l0, self._l1):
            if isinstance(arena, ShmArena):
                arena.start_over()
        if isinstance(self._l0, CudaArena):
            self._l0.close()
            self._l0 = self._copier.l0 = None  # its chunks are made for the size of the slots

    def _take_in(self) -> bool:
        return take_in(self.nvme, self.cache, self.settings.domain)

    @property
    def _l2(self) -> L2 | None:
        return self.nvme.l2

    def _change_volumes(
        self, now: float, behaviour: Behaviour, budgets: Budgets, geometry: Geometry
    ) -> None:
        self.nvme.change(
            behaviour, budgets, geometry, lambda *lost: self.cache.lose_segments(now, *lost)
        )

    def _limit_l2(self, behaviour: Behaviour, budgets: Budgets) -> int:
        if self._l2 is not None:
            self._copier.l2 = self._l2
        return self.nvme.limit(behaviour, budgets)

    def _back_bytes(self, budgets: Budgets, progress: Progress) -> None:
        """Memory behind what `budgets` needs more: before the first geometry the first bytes of
        each arena, where the first slots will lie; later the slots that are missing."""
        if self.cache.shaped:
            self._back_slots(self.cache.geometry, budgets, progress)
        for arena, size in ((self._l0, budgets.l0_bytes), (self._l1, budgets.l1_bytes)):
            if not isinstance(arena, ShmArena):
                continue
            if size > arena.size_bytes:
                raise ArenaError(
                    f"{size} bytes are more than the arena {arena.path.name} can grow to"
                    f" ({arena.size_bytes}); restart the agent with more memory, or ask for less"
                )
            if not self.cache.shaped:
                arena.back_first(size // ALIGNMENT * ALIGNMENT, progress)
                arena.collapse(size, progress)

    def _back_slots(self, geometry: Geometry, budgets: Budgets, seen: Progress = unseen) -> None:
        for arena, slots in zip(
            (self._l0, self._l1), self.cache.missing_slots(budgets), strict=True
        ):
            if arena is not None and slots.size:
                try:
                    arena.back_slots(slots, geometry.slot_bytes, seen)
                except ArenaError as error:
                    raise CoreError(str(error), "OutOfMemory") from error

    # -- running ----------------------------------------------------------------------------

    def layout(self) -> Layout | None:
        """None before the first geometry."""
        if not self.cache.shaped:
            return None
        geometry = self.cache.geometry
        return Layout(
            boot_id=self.boot_id,
            layout_version=LAYOUT_VERSION,
            key_version=KEY_VERSION,
            page_bytes=geometry.page_bytes,
            slot_bytes=geometry.slot_bytes,
            arenas=arena_infos(self._l0, self._l1),
            table_path=str(self.settings.table_path),
        )

    def pump(self) -> None:
        """Cache thread, after every batch of calls: hand new moves to the mover. Never waits."""
        self.cache.make_room()
        moves = self.cache.take_moves()
        if moves:
            self._mover.submit(moves)
        if self.settings.synchronous:
            self.nvme.tend()

    def collect(self, now: float) -> list[Ticket]:
        """Cache thread, after a wake-up: feed outcomes to the cache; tickets finished by them."""
        tickets: list[Ticket] = []
        for move, landed in self._mover.news():
            self.cache.heard(move, landed)
        for move, outcome in self._mover.collect():
            self.on_outcome(now, move, outcome)
            tickets += self.cache.move_done(now, move, outcome)
            self._growing |= move.kind in (MoveKind.PUNCH_L0, MoveKind.PUNCH_L1)
        if self._growing:
            self._regrow()
        if self._l2 is not None:
            lost = self._l2.give_up_lost()
            if lost:
                self.cache.lose_segments(now, lost)
        return tickets

    def _regrow(self) -> None:
        """Positions are free to be used again that a growth may have waited for. Memory for them is
        had a piece at a time, with turns for everybody in between."""
        try:
            self._growing = self.cache.regrow(REGROW_BYTES, self._back_some)
        except ArenaError:  # the tier stays smaller, as its capacity says
            self._growing = False
        if self._growing:
            self._wake()

    def _back_some(self, tier: int, slots: NDArray[np.uint32]) -> None:
        arena = (self._l0, self._l1)[tier]
        assert arena is not None
        arena.back_slots(slots, self.cache.geometry.slot_bytes)

    @property
    def l1(self) -> ShmArena:
        """The arena of L1."""
        return self._l1

    def note_suspects(self) -> None:
        """Cache thread: which segments are suspect now, into the table, for `kvtier inspect`."""
        suspects = self.cache.shelves.pool2.suspects
        if suspects != self._noted_suspects:
            self._noted_suspects = suspects
            numbers = suspects[:MOST_SUSPECTS_NAMED]
            self.table.note(table_notes.SUSPECTS, {"count": len(suspects), "numbers": numbers})

    def lost_memory(self) -> tuple[ArenaLoss, ...]:
        """Cache thread: what clients took away from the arenas, by layer."""
        return self._arena_watch.look(((0, self._l0), (1, self._l1)))

    def trouble(self, volume: str) -> Trouble | None:
        """What is wrong with a volume; None: nothing, or no revision names it. Any thread."""
        return self.nvme.trouble(volume)

    def try_volumes_again(self) -> None:
        """Those that are left out, where it is time to. Any thread but the cache's."""
        with self._preparing:
            self.nvme.try_again()

    def holds(self, volume: str) -> bool:
        """Is a volume open and locked, so that what lies there is served? Any thread."""
        return volume in self.nvme.volumes

    def volumes(self) -> list[tuple[str, int, str]]:
        """Name, bytes of segments, and why it takes no writes (or empty), of each volume that the
        revision in force names."""
        return self.nvme.figures()

    def io_faults(self) -> dict[tuple[str, str], int]:
        """(operation, fault) -> how often a drive did that; see `io_errors`. Any thread."""
        return self.nvme.errors.counts()

    @property
    def nvme_engine(self) -> str:
        """How pages go to and from drives: `io_uring`, or `calls` of preadv and pwritev."""
        return ENGINES[self._flights is None]

    def movers_alive(self) -> bool:
        """Do all mover threads run? For health."""
        return self._mover.alive()

    def drop(self, now: float) -> None:
        """Cache thread: drop every page that nobody holds. With no revision in force, of what an
        earlier process left the memory goes too."""
        cache = self.cache
        cache.drop_all(now)
        if cache.budgets == NO_BUDGETS and cache.shelves.pools[1].limit:
            cache.reconfigure(now, cache.behaviour, NO_BUDGETS)

    def close(self) -> bool:
        """Stop the mover, release locks. L2 stays as durability says, L1 if `keep_memory` is on and
        it has pages: then True."""
        self.cache.deletion.collect(self.table.max_pages)
        self.pump()
        self._mover.close()
        self.nvme.close()
        if isinstance(self._l0, CudaArena):
            self._l0.close()
        return self.memory.close()
