"""What the agent remembers over restarts: the last good revision, its counters, an orphan's grace.

Two files in the state folder. ``revision.json`` changes with each revision that came into force;
``state.json`` every few seconds. Neither is ever needed to serve: a write that fails is reported
once and tried again with the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import structlog
from kvtier_api.policy import RevisionSpec
from kvtier_api.revision import revision_hash
from kvtier_api.validate import InvalidObject, parse

from kvtier_agent.node.desired import Wanted
from kvtier_agent.node.statefile import StateFile

__all__ = ["Memory"]

LAYOUT = 1

log = structlog.get_logger(__name__)


class Memory:
    """``node``: whose memory it is; that of another node (a moved disk) is not believed."""

    def __init__(self, folder: Path, node: str) -> None:
        self._revision = StateFile(folder / "revision.json", LAYOUT)
        self._state = StateFile(folder / "state.json", LAYOUT)
        self._node = node
        self._failing = False
        self.closed: dict[str, int] = {}
        """What earlier processes counted."""

    def recall(self) -> tuple[Wanted | None, float | None]:
        """The last good revision and the seconds of grace left (None: it was not orphaned)."""
        document, problem = self._state.read()
        if problem:
            log.warning("counters start from zero", problem=problem)
        grace: float | None = None
        if document is not None:
            counts = document.get("counters")
            if isinstance(counts, dict):
                self.closed = {str(k): v for k, v in counts.items() if type(v) is int and v >= 0}
            left = document.get("graceLeftSeconds")
            if document.get("node") == self._node and isinstance(left, int | float):
                grace = max(0.0, float(left))
        return self._recall_revision(), grace

    def _recall_revision(self) -> Wanted | None:
        document, problem = self._revision.read()
        if document is None:
            if problem:
                log.warning("no last good revision", problem=problem)
            return None
        if document.get("node") != self._node:
            log.warning("the last good revision on disk is another node's; not used")
            return None
        revision = document.get("revision")
        try:
            spec = parse(RevisionSpec, document.get("spec"))
        except InvalidObject as e:
            log.warning("the last good revision on disk is not valid any more", problem=str(e))
            return None
        if revision != revision_hash(spec):
            log.warning("the last good revision on disk does not match its hash; not used")
            return None
        return Wanted(str(revision), spec, str(document.get("policy") or ""))

    def keep(self, wanted: Wanted) -> None:
        """After a revision came into force."""
        document = {
            "node": self._node,
            "revision": wanted.revision,
            "policy": wanted.policy,
            "spec": wanted.spec.to_dict(),
        }
        self._write(self._revision, document)

    def save(self, counters: Mapping[str, int], grace_left: float | None) -> None:
        """The counters (sums over all processes so far) and an orphan's grace."""
        document = {
            "node": self._node,
            "counters": dict(counters),
            "graceLeftSeconds": grace_left,
        }
        self._write(self._state, document)

    def _write(self, file: StateFile, document: Mapping[str, object]) -> None:
        try:
            file.write(document)
        except OSError as e:
            if not self._failing:
                log.warning("state cannot be kept on disk", path=str(file.path), error=str(e))
            self._failing = True
        else:
            self._failing = False
