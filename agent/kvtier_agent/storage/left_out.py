"""Volumes that the NVMe tier does without for now.

A volume that can take no byte at the start (mounted read-only, or full to the last block) is no
reason to refuse a revision: the memory tiers and the other volumes are sound. The tier works
without it, the node says `Clamped`, and it is tried again ever more slowly (`volume_health`).
Whatever else is wrong with a volume is a mistake that somebody has to mend, and is refused.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable

from kvtier_agent.storage.volume import VolumeError
from kvtier_agent.storage.volume_health import Trouble, VolumeHealth

ERRORS = {"VolumeReadOnly": errno.EROFS, "VolumeFull": errno.ENOSPC}
"""The reasons for which a volume is left out, and the error that each stands for."""


class LeftOut:
    """By name. Changed by one thread at a time, read by any. `clock`: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: dict[str, VolumeHealth] = {}

    def add(self, name: str, error: VolumeError) -> None:
        """Do without a volume because of this. Raises the error where that is no reason to."""
        number = ERRORS.get(error.reason)
        if number is None:
            self.keep(other for other in self._held if other != name)
            raise error
        health = self._held.get(name) or VolumeHealth(name)
        health.refused(self._clock(), OSError(number, os.strerror(number)), placing=True)
        self._held = {**self._held, name: health}

    def remove(self, name: str) -> None:
        """The volume takes writes, which is news if it was left out."""
        health = self._held.get(name)
        if health is not None:
            health.took()
            self._held = {other: h for other, h in self._held.items() if other != name}

    def keep(self, names: Iterable[str]) -> None:
        """Forget all others: no revision names them any more."""
        known = set(names)
        self._held = {name: health for name, health in self._held.items() if name in known}

    def due(self) -> list[str]:
        """Those that may be tried again now."""
        now = self._clock()
        return [name for name, health in self._held.items() if not health.rests(now)]

    def trouble(self, name: str) -> Trouble | None:
        """Why a volume is left out; None: it is not."""
        health = self._held.get(name)
        return None if health is None else health.trouble

    def all(self) -> dict[str, Trouble]:
        """Why each is left out."""
        troubles = {name: health.trouble for name, health in self._held.items()}
        return {name: trouble for name, trouble in troubles.items() if trouble is not None}
