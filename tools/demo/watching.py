"""What the nodes say and hold, sampled: a frame a second, all of them kept for the plot.

Revision and readiness are what a person would see with kubectl; tier use comes from the agents
themselves (their status reports are ten seconds apart), hits from the engines that got the pages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from demo.stage import NODES, Stage
from demo.traffic import Figures, NodeTraffic, TierUse

INTERVAL_SECONDS = 1.0
RECENT_SECONDS = 5.0
"""Rates in a frame are over about so long."""


@dataclass(frozen=True, slots=True)
class NodeFrame:
    """One node at one moment; `recent` is what its engine got in the last seconds."""

    node: str
    revision: str
    ready: bool
    reason: str
    boot: str
    tiers: tuple[TierUse, TierUse, TierUse]
    total: Figures
    recent: Figures
    recent_seconds: float


@dataclass(frozen=True, slots=True)
class Frame:
    """All nodes at one moment, `seconds` after the watch began."""

    seconds: float
    nodes: tuple[NodeFrame, ...]


class Watch:
    """Samples in a thread of its own until `stop`."""

    def __init__(self, stage: Stage, traffic: Mapping[str, NodeTraffic]) -> None:
        self._stage = stage
        self._traffic = traffic
        self._api = stage.plane.api()
        self._began = time.monotonic()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._go, name="watch", daemon=True)
        self.frames: list[Frame] = []
        self.marks: list[tuple[float, str]] = []
        self.broken: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(10)
        self._api.close()

    def mark(self, what: str) -> None:
        """Something happened now; the plot shows it."""
        self.marks.append((time.monotonic() - self._began, what))

    def _go(self) -> None:
        try:
            while not self._stopping.wait(INTERVAL_SECONDS):
                self.frames.append(self._frame())
        except Exception as error:  # the demo must see that nobody watches any more
            self.broken = error

    def _frame(self) -> Frame:
        objects = self._stage.nodes(self._api)
        now = time.monotonic() - self._began
        return Frame(now, tuple(self._node(name, objects.get(name, {}), now) for name in NODES))

    def _node(self, name: str, body: Mapping[str, Any], now: float) -> NodeFrame:
        status = body.get("status", {})
        ready = condition(status, "Ready")
        traffic = self._traffic[name]
        total = traffic.figures()
        before, since = Figures(), 0.0
        for frame in reversed(self.frames):
            one = next(n for n in frame.nodes if n.node == name)
            before, since = one.total, frame.seconds
            if now - frame.seconds >= RECENT_SECONDS:
                break
        return NodeFrame(
            node=name,
            revision=str(status.get("revision", "")),
            ready=ready.get("status") == "True",
            reason=str(ready.get("reason", "")),
            boot=str(status.get("bootID", "")),
            tiers=traffic.tiers(),
            total=total,
            recent=total.less(before),
            recent_seconds=max(0.001, now - since),
        )


def condition(status: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """A condition of a status by its type, {} where it has none."""
    found: dict[str, Any] = next((c for c in status.get("conditions", []) if c["type"] == kind), {})
    return found
