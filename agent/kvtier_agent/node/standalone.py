"""The policy of an agent that runs alone: one file with one KVTierPolicy, reread when it changes.

The file is looked at once a second (size, time of change, inode), not subscribed to: editors
replace files, mounts of ConfigMaps swap symlinks, and network filesystems notify nobody. SIGHUP
reads it at once. A file that is gone or wrong is a problem to report, never an absent policy: the
last good revision stays in force. nodeSelector, priority and rollout are read and checked, and mean
nothing here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import yaml
from kvtier_api.policy import KVTierPolicy
from kvtier_api.reasons import Reason
from kvtier_api.revision import revision_hash
from kvtier_api.validate import parse, validate

from kvtier_agent.node.desired import Problem, Wanted
from kvtier_agent.supervise import Heart

__all__ = ["PolicyFile", "PolicyFileError", "read_policy"]

MOST_BYTES: Final = 1 << 20
"""As much as the API server would take."""
MOST_PROBLEMS_SHOWN: Final = 5

Say = Callable[[Wanted | None, Problem | None], None]


class PolicyFileError(Exception):
    """The file holds no valid policy; one line that says what to do."""


def read_policy(path: Path) -> Wanted:
    """The revision in a policy file. Raises `PolicyFileError`."""
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    except OSError as e:
        raise PolicyFileError(
            f"cannot read policy {path}: {e.strerror}; give --policy a file that holds a "
            "KVTierPolicy"
        ) from e
    if len(text) > MOST_BYTES:
        raise PolicyFileError(f"{path} is larger than {MOST_BYTES} bytes; that is no policy")
    document = _document(path, text)
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


def _document(path: Path, text: bytes) -> Any:
    try:
        documents = [d for d in yaml.load_all(text, Loader=_Strict) if d is not None]
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise PolicyFileError(f"{path}{where}: not YAML: {e.problem or e}") from e
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as e:
        raise PolicyFileError(f"{path}: not YAML: {' '.join(str(e).split())[:200]}") from e
    if len(documents) != 1:
        raise PolicyFileError(
            f"{path} holds {len(documents)} documents; write exactly one KVTierPolicy"
        )
    return documents[0]


class _Strict(yaml.SafeLoader):
    """YAML without duplicate keys: the second would silently win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key.value} is written twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


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
            heart.beat()
            self.look()
            self._again.wait(self._poll_seconds)
            self._again.clear()

    def _fingerprint(self) -> tuple[int, int, int] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino


_GONE: Final = (0, 0, -1)
