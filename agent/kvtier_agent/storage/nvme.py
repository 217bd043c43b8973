"""The NVMe tier of one trust domain: its volumes, the L2 on them, and what was found there.

`open`, `find`, `empty` and `keep` belong to `Core.prepare` (any thread, one at a time); the rest to
the cache thread.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvtier_agent.cache.arena import Progress, unseen
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.settings import Behaviour, Budgets
from kvtier_agent.storage import manifest, recovery
from kvtier_agent.storage.checkpoint import Checkpointer
from kvtier_agent.storage.fileio import FileIO
from kvtier_agent.storage.io_errors import CountedIO, IOErrors
from kvtier_agent.storage.journal_files import JournalFullError
from kvtier_agent.storage.l2 import L2
from kvtier_agent.storage.left_out import LeftOut
from kvtier_agent.storage.manifest import Manifest, newest_geometry
from kvtier_agent.storage.mover import Start
from kvtier_agent.storage.patient_io import PatientIO
from kvtier_agent.storage.settings import CoreSettings
from kvtier_agent.storage.unreadable import Unreadable
from kvtier_agent.storage.volume import Volume, VolumeError
from kvtier_agent.storage.volume_health import Trouble


@dataclass(frozen=True, slots=True)
class JournalFigures:
    """``used_bytes``: of blocks that journals take; checkpoints written, and tries that failed."""

    used_bytes: int = 0
    checkpoints: int = 0
    failed_checkpoints: int = 0


class NvmeTier:
    """`l2` is None until it is wanted. Volumes by name, open and locked."""

    def __init__(self, settings: CoreSettings, io: FileIO, start: Start | None = None) -> None:
        """`start`: `Supervisor.start`, for the loop that writes checkpoints."""
        self.l2: L2 | None = None
        self.volumes: dict[str, Volume] = {}
        self.left_out = LeftOut()
        self.unreadable = Unreadable()
        self._settings = settings
        self.errors = IOErrors()
        self._patient = (
            None if settings.synchronous else PatientIO(io, failed_late=self.errors.failed_late)
        )
        self.io = CountedIO(self._patient or io, self.errors, slow_seconds=settings.slow_io_seconds)
        self._swept: set[str] = set()
        self._emptied: dict[str, tuple[Volume, int]] = {}
        """Volumes that may join without more ado, and the start of the tier (`manifest`)."""
        self._found = recovery.NOTHING
        self._checkpoints = Checkpointer(lambda: self.l2.journals.all() if self.l2 else [])
        if not settings.synchronous:
            self._checkpoints.start(start, f"journal-{settings.domain}")

    # -- before a revision is in force ------------------------------------------------------------

    def open(self, budgets: Budgets) -> dict[str, Volume]:
        """Volumes of the budget that are not open yet; the caller closes or keeps them. One that
        takes no writes is left out. Raises VolumeError for whatever else is wrong with one."""
        opened: dict[str, Volume] = {}
        if not budgets.volumes:
            raise VolumeError(
                "tiers.nvme has a size but no volumes; name at least one", "VolumeUnknown"
            )
        for name in budgets.volumes:
            mount = self._settings.volumes.get(name)
            if mount is None:
                known = ", ".join(sorted(self._settings.volumes)) or "none"
                raise VolumeError(
                    f"volume {name} is not known here (known: {known}); add it to the chart's"
                    f" volumes, or --volume {name}=DIR",
                    "VolumeUnknown",
                )
            if name in self.volumes:
                continue
            try:
                opened[name] = self._volume(name, mount)
                self._manifest_of(opened[name])
            except VolumeError as error:
                if name in opened:
                    opened.pop(name).close()
                try:
                    self.left_out.add(name, error)
                except VolumeError:
                    for volume in opened.values():
                        volume.close()
                    raise
            else:
                self.left_out.remove(name)
        return opened

    def _volume(self, name: str, mount: Path) -> Volume:
        return Volume(
            name,
            mount,
            self._settings.domain,
            allow_root_filesystem=self._settings.allow_root_filesystem,
            io=self.io,
        )

    def _manifest_of(self, volume: Volume) -> Manifest:
        try:
            return manifest.read(volume, self.unreadable.given_up())
        except VolumeError as error:
            self.unreadable.note(error)
            raise

    def try_again(self) -> None:
        """Look at the volumes that are left out, where it is time to: a revision that is prepared
        from now on may find them well."""
        for name in self.left_out.due():
            try:
                volume = self._volume(name, self._settings.volumes[name])
                try:
                    volume.prove()
                finally:
                    volume.close()
                self.left_out.remove(name)
            except VolumeError as error:
                with contextlib.suppress(VolumeError):  # whoever opens it next says what is wrong
                    self.left_out.add(name, error)

    def find(
        self,
        opened: dict[str, Volume],
        behaviour: Behaviour,
        geometry: Geometry | None,
        progress: Progress = unseen,
    ) -> None:
        """Read the journals of what is there, once: of `geometry` or, where that is None (there are
        no clients yet), of the pages. Raises VolumeError."""
        if self.l2 is not None:
            return
        volumes = {**self.volumes, **opened}
        known = [geometry] if geometry is not None else []
        if not known:
            held = newest_geometry([self._manifest_of(volume) for volume in volumes.values()])
            known = [held] if held is not None else []
        if known:
            for name in set(volumes) - self._recover(volumes, known[0], behaviour, progress):
                volumes[name].close()
                opened.pop(name, None)
                self.volumes.pop(name, None)

    def empty(
        self,
        opened: dict[str, Volume],
        budgets: Budgets,
        geometry: Geometry | None,
        progress: Progress = unseen,
    ) -> None:
        """Clear the volumes that are to join the tier in use, for as long as their drives take: the
        cache thread waits for none of it, and one that cannot be cleared is found out before
        another one has left for it. Before the first client (`geometry` None) the pages of its
        model may yet be wanted. Raises VolumeError."""
        if self.l2 is None or geometry != self.l2.geometry:
            return
        held = {volume.name for volume in self.l2.volumes}
        for name in sorted(set(budgets.volumes) - held):
            volume = opened.get(name) or self.volumes.get(name)
            if volume is not None and not self._empty(volume, self.l2, progress):
                opened.pop(name, None)
                self.volumes.pop(name, None)

    def _empty(self, volume: Volume, l2: L2, progress: Progress = unseen) -> bool:
        """Clear a volume for this L2, once. False: it takes no writes, is left out, and closed.
        Raises VolumeError for whatever else is wrong with it."""
        mark = volume, l2.journals.start
        if self._emptied.get(volume.name) == mark:
            return True
        try:
            recovery.clear(volume, l2, self.unreadable.given_up(), progress)
        except VolumeError as error:
            self.unreadable.note(error)
            self.left_out.add(volume.name, error)
            volume.close()
            return False
        self.unreadable.forget(volume.name)
        self._emptied[volume.name] = mark
        return True

    def keep(self, opened: dict[str, Volume], budgets: Budgets) -> None:
        """These volumes are ours now. Others that an earlier process left pages on are emptied:
        those would count against no cap, and a volume that joins later is emptied anyway."""
        self.volumes.update(opened)
        self.left_out.keep(budgets.volumes)
        if not budgets.volumes:
            return  # a revision with NVMe may still be on its way
        others = set(self._settings.volumes) - set(budgets.volumes) - set(self.volumes)
        for name in others - self._swept:
            recovery.sweep(name, self._settings.volumes[name], self._settings.domain, self.io)
        self._swept = others

    # -- on the cache thread ----------------------------------------------------------------------

    def change(
        self,
        behaviour: Behaviour,
        budgets: Budgets,
        geometry: Geometry,
        lose: Callable[[set[int]], None],
    ) -> None:
        """Open L2 if it is wanted; volumes join or leave with a revision. A volume that is named
        stays locked while there is no room for L2 on it. `lose` is called with the numbers of the
        segments that are gone by it. Raises VolumeError."""
        named = set(budgets.volumes) if budgets.l2_bytes else set()
        if named & set(self.volumes):
            self._open_l2(geometry, behaviour, budgets)
        if self.l2 is not None:
            self._join_or_leave(named & set(self.volumes), lose)
        self._unlock_all_but(budgets.volumes)

    def leave(self, named: tuple[str, ...]) -> None:
        """Before the first client: volumes that a revision does not name any more leave, and what
        was found on them goes. Where others are to join, `change` sees to it, once they can."""
        held = {volume.name for volume in self.l2.volumes} if self.l2 is not None else set()
        if set(named) - held:
            return
        if self.l2 is not None:
            self.l2.withdraw(held - set(named))
        self._unlock_all_but(named)

    def _unlock_all_but(self, named: tuple[str, ...]) -> None:
        for name in set(self.volumes) - set(named):
            self.volumes.pop(name).close()

    def _join_or_leave(self, wanted: set[str], lose: Callable[[set[int]], None]) -> None:
        """Nobody leaves before it is certain that the others can join. Raises VolumeError."""
        assert self.l2 is not None
        held = {volume.name for volume in self.l2.volumes}
        joining = []
        for name in sorted(wanted - held):
            if self._empty(self.volumes[name], self.l2):
                joining.append(self.volumes[name])
            else:
                del self.volumes[name]
        lost = self.l2.withdraw(held - wanted)
        if lost:
            lose(lost)
        for volume in joining:
            self._emptied.pop(volume.name, None)
            self.l2.add(volume)

    def _new_l2(self, volumes: list[Volume], geometry: Geometry) -> L2:
        return L2(volumes, geometry, io=self.io, journal=self._settings.journal)

    def _open_l2(self, geometry: Geometry, behaviour: Behaviour, budgets: Budgets) -> None:
        if self.l2 is not None and self.l2.geometry == geometry:
            return
        if self.l2 is not None:
            self.l2.close()
        there = {name: self.volumes[name] for name in budgets.volumes if name in self.volumes}
        for name in set(there) - self._recover(there, geometry, behaviour, unseen):
            self.volumes.pop(name).close()

    def _recover(
        self,
        volumes: dict[str, Volume],
        geometry: Geometry,
        behaviour: Behaviour,
        progress: Progress,
    ) -> set[str]:
        """A new L2 with what is on these volumes; those that take no writes are left out. Names of
        the others. Raises VolumeError."""
        left = dict(volumes)
        while True:
            l2 = self._new_l2(list(left.values()), geometry)
            l2.durability = behaviour.durability
            try:
                found = recovery.recover(l2, lambda _: progress(), self.unreadable.given_up())
            except VolumeError as error:
                self.unreadable.note(error)
                if left.pop(error.volume, None) is None:
                    raise
                self.left_out.add(error.volume, error)
            else:
                self.l2, self._found = l2, found
                for name in left:
                    self.unreadable.forget(name)
                return set(left)

    def limit(self, behaviour: Behaviour, budgets: Budgets) -> int:
        """Slots that the volumes can hold under this budget."""
        if self.l2 is None:
            return 0
        return self.l2.limit(budgets.l2_bytes, budgets.reserve_percent, behaviour.durability)

    def take_found(self) -> recovery.Found | None:
        """What was found, once; None: nothing, or not looked yet."""
        found, self._found = self._found, recovery.NOTHING
        if self.l2 is None or found is recovery.NOTHING:
            return None
        return found.only(np.isin(found.slots // self.l2.per_segment, list(self.l2.segments)))

    def tend(self) -> None:
        """Write checkpoints that are due, here and now. For `synchronous`."""
        self._checkpoints.tend()

    def trouble(self, name: str) -> Trouble | None:
        """What is wrong with a volume, that it takes no writes or its journal no checkpoint. None:
        nothing, or no revision names it. Any thread."""
        volume = self.volumes.get(name)
        if volume is None:
            return self.left_out.trouble(name)
        error = self._checkpoints.trouble(volume.folder)
        if volume.health.trouble is not None or error is None:
            return volume.health.trouble
        reason = "VolumeUnusable"
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and not isinstance(error, JournalFullError):
            reason = "VolumeFull"
        message = f"no checkpoint of its journal: {error.strerror or error}"
        return Trouble(reason, message, 0, 0.0, 0.0, 0.0, placing=False)

    def figures(self) -> list[tuple[str, int, str]]:
        """See `Core.volumes`."""
        held = self.l2.held_bytes() if self.l2 is not None else {}
        troubles: dict[str, Trouble | None] = dict(self.left_out.all())
        for volume in self.l2.volumes if self.l2 is not None else ():
            troubles[volume.name] = volume.health.trouble
        return [(name, held.get(name, 0), t.reason if t else "") for name, t in troubles.items()]

    def journal(self) -> JournalFigures:
        """Of the journals of all volumes."""
        used = self.l2.journals.space.used_bytes if self.l2 is not None else 0
        checkpoints = self._checkpoints
        return JournalFigures(used, checkpoints.checkpoints, checkpoints.failures)

    def close(self) -> None:
        """Unlock. What lies there stays, as durability says."""
        self._checkpoints.close()
        if self.l2 is not None:
            self.l2.close()
        for volume in self.volumes.values():
            volume.close()
        self.volumes.clear()
        if self._patient is not None:
            self._patient.end()
