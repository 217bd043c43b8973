"""The shared memory of one trust domain, which outlives the agent: its lock, table and arenas.

A start finds what the process before left there, whether that was stopped or killed. If table and
L1 are exactly as this version would have made them and nobody uses them, the pages of L1 are taken
over (`cache.warm` says which), into a table that is made anew and then put in the old one's place:
a start that is killed itself leaves the old one to the next. Otherwise the start is cold, with a
reason, and the files are replaced.

L0 of a `cpu` device is the same file again, so that its memory need not be had twice while clients
still map it; its contents count for nothing, as those of a device would.
"""

from __future__ import annotations

import fcntl
import os
import stat
from dataclasses import asdict
from pathlib import Path

import numpy as np

from kvtier_agent.cache import adoption, table_notes
from kvtier_agent.cache.arena import ArenaError, KeptFile, ShmArena
from kvtier_agent.cache.cache import Cache
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.identity import KEY_VERSION
from kvtier_agent.cache.page_table import PageTable
from kvtier_agent.cache.record import READ_L1, Rows
from kvtier_agent.cache.table_remains import Remains, RemainsError, read_remains
from kvtier_agent.cache.table_view import TableError
from kvtier_agent.cache.warm import Restart, Survivors, choose
from kvtier_agent.storage.settings import CoreError, CoreSettings

NOBODY: Rows = np.empty(0, dtype=np.uint32)


class SharedMemory:
    """Locked from the constructor to `close`. `rows`: of the pages that were taken over, least
    recently used first; `geometry`: theirs, None after a cold start."""

    def __init__(self, settings: CoreSettings, boot_id: bytes) -> None:
        """Raises CoreError when another agent has the files, or when they cannot be made."""
        self._settings = settings
        self._boot_id = boot_id
        self.geometry: Geometry | None = None
        self.rows = NOBODY
        self.restart = Restart()
        self._names: list[str] = []
        self._backed = (0, 0)
        self.l0: ShmArena | None = None
        self._lock = _locked(settings.arena_folder / f"{settings.domain}.lock", settings.domain)
        try:
            if not self._take_over():
                self._start_cold()
        except BaseException as error:
            os.close(self._lock)
            if isinstance(error, ArenaError | TableError | OSError):
                raise CoreError(f"domain {settings.domain}: {error}", "SharedMemory") from error
            raise
        self.l1.on_backed = self._l1_backed
        self._l1_backed(self.l1.backed_prefix)
        if self.l0 is not None:
            self.l0.on_backed = self._l0_backed
            self._l0_backed(self.l0.backed_prefix)
        self.table.note(table_notes.START, self.restart.to_dict())

    # -- start ------------------------------------------------------------------------------------

    def _take_over(self) -> bool:
        """Go on with what is there. False: nothing is, or `restart.cold` says why it cannot be."""
        settings = self._settings
        try:
            _check_folder(settings.arena_folder)
            remains = read_remains(settings.table_path, settings.gid)
            if remains is None:
                return False
            self.l1 = self._kept(".l1", settings.maximum_l1_bytes, remains.l1)
        except (RemainsError, ArenaError) as error:
            self.restart = Restart(cold=str(error))
            return False
        geometry = remains.geometry
        survivors = choose(
            remains.records,
            page_bytes=geometry.page_bytes,
            slots=remains.l1.size_bytes // geometry.slot_bytes,
            room=settings.cache.max_pages,
        )
        self.restart = Restart(len(survivors), survivors.dropped)
        if not len(survivors):
            if self.restart.damaged:
                self.restart = Restart(
                    dropped=survivors.dropped, cold="no record of the page table can be believed"
                )
            self.l1.close()
            return False
        try:
            whole = self.l1.keep_slots(survivors.slots(), geometry.slot_bytes)
            self.table, self.rows = self._table_of(survivors)
        except (ArenaError, TableError) as error:
            self.l1.close()
            self.restart = Restart(dropped=survivors.dropped, cold=str(error))
            return False
        self.geometry, self._names = geometry, remains.names
        self._keep_l0(remains)
        first = self.l0.backed_prefix // geometry.slot_bytes if self.l0 is not None else 0
        self._backed = (first, whole)
        self._describe(geometry)
        self.table.note(table_notes.FROZEN, remains.names)
        self.table.publish()
        return True

    def _kept(self, suffix: str, maximum_bytes: int, kept: KeptFile) -> ShmArena:
        path = self._settings.arena_folder / f"{self._settings.domain}{suffix}"
        return ShmArena(path, maximum_bytes, gid=self._settings.gid, kept=kept)

    def _table_of(self, survivors: Survivors) -> tuple[PageTable, Rows]:
        """A new table with these pages, not yet in the old one's place. Raises TableError."""
        try:
            return self._filled(survivors)
        except TableError:
            # No memory for both tables. Without the old one a kill just now means a cold start.
            self._settings.table_path.unlink(missing_ok=True)
            return self._filled(survivors)

    def _filled(self, survivors: Survivors) -> tuple[PageTable, Rows]:
        table = self._new_table(publish=False)
        try:
            return table, adoption.insert_survivors(table, survivors)
        except TableError:
            table.close()
            raise

    def _new_table(self, *, publish: bool) -> PageTable:
        settings = self._settings
        return PageTable(
            settings.table_path,
            max_pages=settings.cache.max_pages,
            boot_id=self._boot_id,
            gid=settings.gid,
            publish=publish,
        )

    def _keep_l0(self, remains: Remains) -> None:
        if self._settings.device != "cpu":
            return
        path = self._settings.arena_folder / f"{self._settings.domain}.l0"
        try:
            kept = KeptFile(path.lstat().st_ino, 0, remains.l0_backed)
            self.l0 = self._kept(".l0", self._settings.maximum_l0_bytes, kept)
        except (OSError, ArenaError):
            self.l0 = self._fresh(".l0", self._settings.maximum_l0_bytes)

    def _start_cold(self) -> None:
        """Fresh files in place of what is there."""
        settings = self._settings
        # First of all the old table: were it to stay, it would tell of an arena that is gone.
        settings.table_path.unlink(missing_ok=True)
        self.l1 = self._fresh(".l1", settings.maximum_l1_bytes)
        if settings.device == "cpu":
            self.l0 = self._fresh(".l0", settings.maximum_l0_bytes)
        self.table = self._new_table(publish=True)

    def _fresh(self, suffix: str, maximum_bytes: int) -> ShmArena:
        path = self._settings.arena_folder / f"{self._settings.domain}{suffix}"
        return ShmArena(path, maximum_bytes, gid=self._settings.gid)

    # -- while it is in use -----------------------------------------------------------------------

    def new_cache(self) -> Cache:
        """The cache over these files, with the pages that were taken over."""
        cache = Cache(self.table, self.geometry, settings=self._settings.cache)
        cache.counters.taken_over_pages = self.restart.taken_over
        cache.counters.dropped_at_start_pages = self.restart.dropped_pages
        if self.geometry is not None:
            for pool, arena in zip(cache.shelves.pools[:2], (self.l0, self.l1), strict=True):
                if arena is not None:
                    pool.maximum = arena.size_bytes // self.geometry.slot_bytes
            cache.take_over(self.rows, self._names, self._backed)
        return cache

    def describe(self, geometry: Geometry) -> None:
        """Before the first page of a geometry: what the records will mean."""
        self._describe(geometry)

    def _describe(self, geometry: Geometry) -> None:
        self.table.note(
            table_notes.GEOMETRY,
            {
                "geometry": asdict(geometry),
                "fingerprint": geometry.stored_as.hex(),
                "key_version": KEY_VERSION,
                "l1_inode": self.l1.inode,
                "l1_bytes": self.l1.size_bytes,
            },
        )

    def name_frozen(self, names: list[str]) -> None:
        """What the numbers of frozen prefixes in the records mean."""
        if names != self._names:
            self.table.note(table_notes.FROZEN, names)
            self._names = list(names)

    def _l0_backed(self, size: int) -> None:
        self.table.header["l0_backed"] = size

    def _l1_backed(self, size: int) -> None:
        self.table.header["l1_backed"] = size

    def close(self) -> bool:
        """Leave the files to the next process, or remove them if there is nothing in them that it
        would take over or `keep_memory` is off. Were they left?"""
        if self._lock < 0:
            return False
        state = self.table.state[: self.table.capacity]
        keep = self._settings.keep_memory and bool(READ_L1[state].any())
        self.table.close(keep=keep)
        for arena in (self.l0, self.l1):
            if arena is not None:
                arena.close(keep=keep)
        if not keep:
            (self._settings.arena_folder / f"{self._settings.domain}.lock").unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = -1
        return keep


def _check_folder(folder: Path) -> None:
    """Others must not be able to put files there. Raises RemainsError."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise RemainsError(f"{folder} is no folder of this user's")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RemainsError(f"others may write to {folder}")


def _locked(path: Path, domain: str) -> int:
    """The lock file, open and locked until it is closed. Raises CoreError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        try:
            lock = os.open(path, flags, 0o600)
        except OSError as error:
            raise CoreError(
                f"domain {domain}: cannot lock {path}: {error.strerror}", "SharedMemory"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise CoreError(
                f"domain {domain}: the arenas in {path.parent} are in use by another agent; stop"
                " it, or choose another folder with --shm-dir",
                "SharedMemory",
            ) from None
        try:
            if os.fstat(lock).st_ino == path.stat().st_ino:
                return lock
        except FileNotFoundError:
            pass
        os.close(lock)  # whoever had it removed it meanwhile
