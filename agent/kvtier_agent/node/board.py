"""The node's status, put together from where its parts are, and kept where others find it.

`StatusBoard.status` is what the reporter writes to the API server. The board's own loop keeps the
counters on disk and the same status in ``status.json`` in the run folder, for people, scripts and
an agent that runs alone: the very document that ``kubectl get ktn -o jsonpath={.status}`` shows.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import structlog

from kvtier_agent import heap
from kvtier_agent.cache.snapshot import NAMES as TIERS
from kvtier_agent.node import counters, status
from kvtier_agent.node.cadence import urgent_part
from kvtier_agent.node.control import Control
from kvtier_agent.node.counters import Counters
from kvtier_agent.node.lifecycle import remaining_grace
from kvtier_agent.node.memory import PATIENCE_SECONDS, Memory
from kvtier_agent.node.rooms import counters_of, tiers_of
from kvtier_agent.node.version import agent_version
from kvtier_agent.node.view import NodeView
from kvtier_agent.server.loop import CacheLoop
from kvtier_agent.supervise import Heart, Supervisor

__all__ = ["StatusBoard"]

SAVE_SECONDS: Final = 5.0
LOOK_SECONDS: Final = 0.5
HEAP_SECONDS: Final = 10.0
WRITE_SECONDS: Final = 3 * PATIENCE_SECONDS
"""What is kept may take so long on a disk that is slow: it is not needed to serve."""
LAST_PATIENCE_SECONDS: Final = 1.0
"""A process that ends has no more for its state: pages of volumes and memory come first."""

log = structlog.get_logger(__name__)


class StatusBoard:
    """See the module. ``wall``: seconds since 1970, for the times that people read."""

    def __init__(
        self,
        control: Control,
        loop: CacheLoop,
        supervisor: Supervisor,
        memory: Memory,
        path: Path,
        *,
        save_seconds: float = SAVE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._control = control
        self._loop = loop
        self._supervisor = supervisor
        self._memory = memory
        self._path = path
        self._clock = clock
        self._wall = wall
        self._wake = threading.Event()
        self._save_seconds = save_seconds
        self._saved_at = clock() - save_seconds
        self._shown: dict[str, Any] = {}
        self._kept: Counters = memory.closed
        self.boot_id = secrets.token_hex(16)
        self.rival: Callable[[], str] = lambda: ""
        """Boot id of another agent that reports under this node's name, or empty; any thread."""

    def status(self, present: Mapping[str, Any]) -> dict[str, Any]:
        """The status now; ``present``: the one that stands, for its transition times.

        Its counters are those last kept on disk: what was shown does not go back after a kill.
        """
        return self._document(present, self._kept)

    def _document(self, present: Mapping[str, Any], total: Counters) -> dict[str, Any]:
        return status.make_status(
            self._view(),
            tiers_of(self._loop.snapshot),
            total,
            status.previous_conditions(present),
            wall=self._wall(),
            version=agent_version(),
            boot_id=self.boot_id,
        )

    def wake(self) -> None:
        """The view changed; from any thread."""
        self._wake.set()

    def run(self, heart: Heart) -> None:
        """Until the heart is asked to stop. Of the process's own state it minds the heap too."""
        tidied = self._clock()
        while not heart.stopping.is_set():
            heart.beat()
            with heart.allowing(WRITE_SECONDS):
                self.save()
            if self._clock() - tidied >= HEAP_SECONDS:
                heap.give_back()
                tidied = self._clock()
            self._wake.wait(LOOK_SECONDS)
            self._wake.clear()

    def save(self, last: bool = False) -> None:
        """Counters and status file, when something urgent changed and every few seconds
        (``last``: now, and without much waiting)."""
        now = self._clock()
        due = last or self._memory.news or now - self._saved_at >= self._save_seconds
        total = counters.total(self._memory.closed, counters_of(self._loop.snapshot))
        fresh = self._document(self._shown, self._kept)
        if due or urgent_part(fresh) != urgent_part(self._shown):
            # Kept first, shown then; what could not be kept is not shown.
            self._saved_at = now
            patience = LAST_PATIENCE_SECONDS if last else PATIENCE_SECONDS
            if self._memory.save(total, remaining_grace(self._control.view.life, now), patience):
                self._kept = total
            self._shown = self._document(self._shown, self._kept)
            self._show(self._shown)

    def _view(self) -> NodeView:
        causes = tuple(self._supervisor.causes())
        snapshot = self._loop.snapshot
        domains = list(snapshot.domains.values()) if snapshot is not None else []
        restarts = tuple(
            f"domain {domain.name}: {domain.restart}" if len(domains) > 1 else domain.restart
            for domain in domains
            if domain.restart
        )
        cut = tuple(
            f"{TIERS[arena.layer]} of domain {domain.name}"
            for domain in domains
            for arena in domain.lost_memory
            if arena
        )
        return replace(
            self._control.view,
            causes=causes,
            restarts=restarts,
            cut=cut,
            rival=self.rival(),
            unkept=self._memory.problem,
        )

    def _show(self, document: Mapping[str, Any]) -> None:
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):  # it is a convenience; the run folder may be full
            temporary.write_text(json.dumps(document, indent=1) + "\n")
            temporary.replace(self._path)
