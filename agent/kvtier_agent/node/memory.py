"""What the agent remembers over restarts: the last good revision, its counters, an orphan's grace,
how large the engines' KV pool was.

Two files in the state folder. ``revision.json`` changes with each revision that came into force;
``state.json`` every few seconds. Neither is ever needed to serve: a write that fails, or takes too
long, is reported once and tried again with the next ``save``; until then ``problem`` says why.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import structlog
from kvtier_api.policy import RevisionSpec
from kvtier_api.revision import revision_hash
from kvtier_api.validate import InvalidObject, parse

from kvtier_agent.node.desired import Wanted
from kvtier_agent.node.patience import Patience
from kvtier_agent.node.statefile import StateFile

__all__ = ["Memory"]

LAYOUT = 1
PATIENCE_SECONDS: Final = 10.0
"""More than a busy disk takes for a flush."""

log = structlog.get_logger(__name__)


class Memory:
    """``node``: whose memory it is; that of another node (a moved disk) is not believed."""

    def __init__(self, folder: Path, node: str) -> None:
        self._revision = StateFile(folder / "revision.json", LAYOUT)
        self._state = StateFile(folder / "state.json", LAYOUT)
        self._node = node
        self._writing = threading.Lock()
        """Held while a disk may hang: only `save` waits for it."""
        self._patience = Patience()
        self._owing = threading.Lock()
        self._owed: dict[str, object] | None = None
        """A revision that is in force and was not written yet."""
        self._news = False
        self._problems: dict[str, str] = {}
        self.closed: dict[str, int] = {}
        """What earlier processes counted."""
        self.engine_pool = 0
        """KV pool of the engines, bytes: what `recall` found, then what `save` is to keep."""

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
            if document.get("node") == self._node:
                if isinstance(left, int | float):
                    grace = max(0.0, float(left))
                pool = document.get("enginePoolBytes")
                self.engine_pool = pool if type(pool) is int and pool > 0 else 0
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

    @property
    def problem(self) -> str:
        """Why something cannot be kept now, for people; empty while all is. Any thread."""
        return "; ".join(list(self._problems.values()))

    @property
    def news(self) -> bool:
        """Whether there is a revision that no `save` has tried to write. Any thread."""
        return self._news

    def keep(self, wanted: Wanted) -> None:
        """After a revision came into force: the next `save` writes it. Any thread; waits for no
        disk."""
        document: dict[str, object] = {
            "node": self._node,
            "revision": wanted.revision,
            "policy": wanted.policy,
            "spec": wanted.spec.to_dict(),
        }
        with self._owing:
            self._owed, self._news = document, True

    def save(
        self,
        counters: Mapping[str, int],
        grace_left: float | None,
        patience: float = PATIENCE_SECONDS,
    ) -> bool:
        """The counters (sums over all processes so far), an orphan's grace, and a revision that is
        owed. Are the counters on disk? Each of the two files is waited for ``patience`` seconds.
        """
        document = {
            "node": self._node,
            "counters": dict(counters),
            "graceLeftSeconds": grace_left,
            "enginePoolBytes": self.engine_pool,
        }
        if not self._writing.acquire(timeout=patience):
            return False
        try:
            self._pay(patience)
            return self._write(self._state, document, patience)
        finally:
            self._writing.release()

    def _pay(self, patience: float) -> None:
        with self._owing:
            owed, self._news = self._owed, False
        if owed is not None and self._write(self._revision, owed, patience):
            with self._owing:
                if self._owed is owed:
                    self._owed = None

    def _write(self, file: StateFile, document: Mapping[str, object], patience: float) -> bool:
        name = file.path.name
        try:
            self._patience.do(lambda: file.write(document), patience)
        except OSError as e:
            if name not in self._problems:
                log.warning(
                    "state cannot be kept on disk; until it can, a restart forgets what is new",
                    path=str(file.path), error=str(e),
                    to_do="free space there, or mount --state-dir writable",
                )  # fmt: skip
            self._problems[name] = f"{file.path} cannot be written ({e.strerror or e})"
            return False
        if self._problems.pop(name, ""):
            log.info("state is kept on disk again", path=str(file.path))
        return True
