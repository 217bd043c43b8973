"""The policy of an agent that runs alone: one file with one KVTierPolicy, reread when it changes.

The file is looked at once a second (size, time of change, inode), not subscribed to: editors
replace files, mounts of ConfigMaps swap symlinks, and network filesystems notify nobody. SIGHUP
reads it at once. A file that is gone or wrong is a problem to report, never an absent policy: the
last good revision stays in force. nodeSelector, priority and rollout are read and checked, and mean
nothing here.
"""

from __future__ import annotations

import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvtier_api import manifest
from kvtier_api.policy import KVTierPolicy
from kvtier_api.reasons import Reason
from kvtier_api.revision import revision_hash
from kvtier_api.validate import parse, validate

from kvtier_agent.node.desired import Problem, Wanted
from kvtier_agent.supervise import Heart

__all__ = ["PolicyFile", "PolicyFileError", "read_policy"]

MOST_PROBLEMS_SHOWN: Final = 5
BEAT_SECONDS: Final = 0.2

Say = Callable[[Wanted | None, Problem | None], None]


class PolicyFileError(Exception):
    """The file holds no valid policy; one line that says what to do."""


def read_policy(path: Path) -> Wanted:
    """The revision in a policy file. Raises `PolicyFileError`."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):  # a pipe that nobody writes to would hold up start and end
            raise PolicyFileError(
                f"policy {path} is no regular file; give --policy a file that holds a KVTierPolicy"
            )
        with path.open("rb") as file:
            text = file.read(manifest.MAX_FILE_BYTES + 1)
    except OSError as e:
        raise PolicyFileError(
            f"cannot read policy {path}: {e.strerror}; give --policy a file that holds a "
            "KVTierPolicy"
        ) from e
    try:
        document = manifest.one(text)
    except manifest.ManifestError as e:
        raise PolicyFileError(f"{path}: {e}") from e
    problems = validate(document)
    if isinstance(document, dict) and document.get("kind") not in (None, "KVTierPolicy"):
        raise PolicyFileError(f"{path}: write kind: KVTierPolicy, not {document['kind']}")
    if problems:
        shown = "; ".join(str(p) for p in problems[:MOST_PROBLEMS_SHOWN])
        more = len(problems) - MOST_PROBLEMS_SHOWN
        raise PolicyFileError(f"{path}: {shown}" + (f"; and {more} more" if more > 0 else ""))
    policy = parse(KVTierPolicy, document)
    spec = policy.spec.behaviour()
    return Wanted(revision_hash(spec), spec, policy.metadata.name)


class PolicyFile:
    """Watches one file and says what it holds. ``look`` is the whole of it; ``run`` repeats it."""

    def __init__(self, path: Path, say: Say, poll_seconds: float = 1.0) -> None:
        self._path = path
        self._say = say
        self._poll_seconds = poll_seconds
        self._seen: tuple[int, int, int] | None = None
        self._again = threading.Event()

    def read_first(self) -> Wanted:
        """At start, where a wrong file is the user's mistake. Raises `PolicyFileError`."""
        self._seen = self._fingerprint()
        return read_policy(self._path)

    def reread(self) -> None:
        """Read at the next turn whatever the file's time says (SIGHUP)."""
        self._seen = None
        self._again.set()

    def look(self) -> bool:
        """Reads the file if it changed, and says what it found. Whether it did."""
        now = self._fingerprint()
        if now is not None and now == self._seen:
            return False
        if now is None and self._seen == _GONE:
            return False
        self._seen = now or _GONE
        try:
            wanted = read_policy(self._path)
        except PolicyFileError as e:
            self._say(None, Problem(Reason.InvalidRevision, str(e)))
        else:
            self._say(wanted, None)
        return True

    def run(self, heart: Heart) -> None:
        """Until the heart is asked to stop."""
        while not heart.stopping.is_set():
            self.look()
            end = time.monotonic() + self._poll_seconds
            while not heart.stopping.is_set() and time.monotonic() < end:
                heart.beat()
                if self._again.wait(BEAT_SECONDS):
                    self._again.clear()
                    break

    def _fingerprint(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


_GONE: Final = (0, 0, -1)
