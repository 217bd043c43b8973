"""Whether a volume takes writes. One that refused rests, and is tried again ever more slowly.

    VolumeFull       the file system is full, or its reserve is reached
    VolumeReadOnly   EROFS: an error of the drive may have done that
    VolumeUnusable   any other error: EIO, a folder that is gone

What a volume refuses is no failure of the tier while another one takes it (`placement`). Time is
an argument, in seconds on one monotonic clock.
"""

from __future__ import annotations

import errno
import threading
from dataclasses import dataclass, replace

import structlog

FIRST_REST_SECONDS = 1.0
LONGEST_REST_SECONDS = 60.0
HANG_REST_SECONDS = 30.0
"""Of a drive that does not answer: it may yet, and what lies there can often be read meanwhile."""
LASTING = 3
LASTING_SECONDS = 30.0
"""A drive that refused so often in a row, over so long a time at least, is believed to be lost: a
controller that starts anew, or a journal that needs another log, takes seconds. In a row: no write
succeeded in between, and none of them came so long after it could have been tried again."""

OWN_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors that say nothing about the drive, however long they last."""

log = structlog.get_logger("kvtier.storage.volume")


@dataclass(frozen=True, slots=True)
class Trouble:
    """`reason`: as above. `message`: what the system said. `times`: refusals in a row, the first at
    `since` (0: a write has succeeded since the last one); `until`: when it is tried again, `rest`
    seconds after the last of them. `placing`: it was no write to blocks that were there that
    failed, so none that succeeds says that all is well. `hangs`: it gave no answer at all."""

    reason: str
    message: str
    times: int
    since: float
    until: float
    rest: float
    placing: bool
    hangs: bool = False

    @property
    def failing(self) -> bool:
        """Is the drive broken rather than full?"""
        return self.reason != "VolumeFull"

    @property
    def lost(self) -> bool:
        """Has it failed so often that what lies there is given up?"""
        if self.reason != "VolumeUnusable" or self.times < LASTING:
            return False
        return self.until - self.rest - self.since >= LASTING_SECONDS

    def given_up(self, now: float) -> bool:
        """Is it lost, and not being tried just now?"""
        return self.lost and self.until > now


class VolumeHealth:
    """Of one volume. Any thread: `trouble` (None: it takes writes) is replaced as a whole."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.trouble: Trouble | None = None
        self._changing = threading.Lock()

    def rests(self, now: float) -> bool:
        """Is it not to be tried now?"""
        trouble = self.trouble
        return trouble is not None and now < trouble.until

    def hangs(self, now: float) -> bool:
        """Did it give no answer, so that nothing is to be asked of it now?"""
        return self.trouble is not None and self.trouble.hangs and self.rests(now)

    def due(self, now: float) -> bool:
        """Is it a drive that failed and may be tried again?"""
        trouble = self.trouble
        return trouble is not None and trouble.failing and now >= trouble.until

    def refused(self, now: float, error: OSError, *, placing: bool) -> None:
        """A write, or what comes before it, failed. Said in the log when that is news; refusals
        while it rests, by writes that were under way, count once."""
        if error.errno in OWN_LIMITS:
            return
        reason = {errno.EROFS: "VolumeReadOnly"}.get(error.errno or 0, "VolumeUnusable")
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = "VolumeFull"
        message = error.strerror or str(error)
        hangs = error.errno == errno.ETIMEDOUT
        with self._changing:
            before = self.trouble
            if before is not None and before.reason != reason:
                before = None
            if before is not None and now < before.until:
                return
            rest, times, since = HANG_REST_SECONDS if hangs else FIRST_REST_SECONDS, 1, now
            if before is not None:
                rest = min(2 * before.rest, LONGEST_REST_SECONDS)
                rest = max(rest, HANG_REST_SECONDS) if hangs else rest
                if before.times and now - before.until <= LASTING_SECONDS:
                    times, since = before.times + 1, before.since
            self.trouble = now_so = Trouble(
                reason, message, times, since, now + rest, rest, placing, hangs
            )  # fmt: skip
        if before is None:
            log.warning(
                "a volume takes no writes; it is tried again, and others, if any, are used",
                volume=self.name, reason=reason, error=message,
            )  # fmt: skip
        elif now_so.lost and not before.lost:
            log.error(
                "a volume goes on failing; what lies there is given up",
                volume=self.name, error=message,
            )  # fmt: skip

    def served(self) -> None:
        """A write succeeded, which proves no more than that not all of them are refused."""
        with self._changing:
            if self.trouble is not None and self.trouble.times:
                self.trouble = replace(self.trouble, times=0)

    def took(self) -> None:
        """A write that proves that all is well succeeded."""
        with self._changing:
            well, self.trouble = self.trouble is None, None
        if not well:
            log.info("a volume takes writes again", volume=self.name)
