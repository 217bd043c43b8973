"""When a status is written: the rule that keeps many agents from drowning one API server.

Each agent reports once an interval, which the operator sets from the number of nodes (max(10 s,
nodes / 50)), so that steady state is at most about 50 writes a second over the whole cluster. What
somebody waits for (the revision in force, the generation seen, a condition, which tiers there are)
is written at once, though never within `SHORTEST_SECONDS` of the write before. Counters and tier
use alone wait for the interval. After a failure the next try waits `backoff.delay`, and carries
whatever is newest then.

Pure: seconds are monotonic and passed in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

__all__ = ["Cadence", "next_write", "urgent_part"]

SHORTEST_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Cadence:
    """What the reporter remembers. ``urgent``: the part last written that somebody waits for."""

    written_at: float | None = None
    urgent: object = None
    not_before: float = 0.0

    def wrote(self, urgent: object, now: float) -> Cadence:
        return Cadence(written_at=now, urgent=urgent, not_before=now + SHORTEST_SECONDS)

    def failed(self, now: float, wait: float) -> Cadence:
        return replace(self, not_before=now + max(SHORTEST_SECONDS, wait))


def next_write(cadence: Cadence, urgent: object, interval: float, now: float) -> float:
    """Seconds until the next write is due; 0 or less: now."""
    if cadence.written_at is None or urgent != cadence.urgent:
        return cadence.not_before - now
    return max(cadence.not_before, cadence.written_at + interval) - now


def urgent_part(status: Mapping[str, Any]) -> object:
    """The part of a status that is written at once when it changes. Times, sizes, counters and
    the wording of messages (they carry figures) are not in it."""
    conditions = sorted(
        (c["type"], c["status"], c["reason"]) for c in status.get("conditions") or []
    )
    return (
        status.get("observedGeneration"),
        status.get("revision"),
        status.get("bootID"),
        tuple(status.get("notApplied") or ()),
        tuple(tier["name"] for tier in status.get("tiers") or ()),
        tuple(conditions),
    )
