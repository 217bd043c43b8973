"""Volumes on which something could not be read when they were looked through.

Nothing is removed for it: one error, or a limit of our own, says little about what lies there. So
the revision is refused, and tried again by whoever asked for it. What goes on being unreadable for
as long as it takes to believe that a drive is lost (`volume_health`) is given up: what can be read
is used, the rest is removed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from kvtier_agent.storage.volume import Volume, VolumeError, refused
from kvtier_agent.storage.volume_health import LASTING, LASTING_SECONDS, OWN_LIMITS

log = structlog.get_logger("kvtier.storage.recovery")


class UnreadableError(VolumeError):
    """What lies on a volume could not be looked at; nothing of it was removed."""

    own_limit = False


def unreadable(volume: Volume, what: str, error: OSError) -> UnreadableError:
    """`error`, met while `what` was looked at."""
    said = refused(volume.name, f"cannot read {what}", error)
    made = UnreadableError(str(said), said.reason)
    made.volume = volume.name
    made.own_limit = error.errno in OWN_LIMITS
    return made


@dataclass(frozen=True, slots=True)
class _Tries:
    times: int
    since: float
    last: float

    @property
    def lasting(self) -> bool:
        return self.times >= LASTING and self.last - self.since >= LASTING_SECONDS


class Unreadable:
    """By name. One thread at a time. `clock`: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tries: dict[str, _Tries] = {}

    def note(self, error: VolumeError) -> None:
        """A try failed with this. Tries that lie far apart are not one trouble that lasts."""
        if not isinstance(error, UnreadableError) or error.own_limit:
            return
        now = self._clock()
        before = self._tries.get(error.volume)
        if before is None or now - before.last > LASTING_SECONDS:
            before = _Tries(0, now, now)
        tries = _Tries(before.times + 1, before.since, now)
        if tries.lasting and not before.lasting:
            log.error("what cannot be read on a volume is given up", problem=str(error))
        self._tries[error.volume] = tries

    def given_up(self) -> frozenset[str]:
        """Volumes of which no more can be expected than can be read now."""
        return frozenset(name for name, tries in self._tries.items() if tries.lasting)

    def forget(self, name: str) -> None:
        """It was looked through."""
        self._tries.pop(name, None)
