"""The warning of a policy's ``pressure`` section: a line in the log when L0 rises above a line.

The level itself comes and goes within milliseconds; the cache counts how often it rose, and this
compares those counts between two snapshots, so that no rise goes unnoticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import structlog

__all__ = ["PressureLog"]

_RISES: Final = (
    (
        "demote_all",
        "L0 rose above pressure.demotePercent: every page that is not pinned or frozen is demoted;"
        " unpin pages sooner, or make tiers.hbm larger",
    ),
    (
        "tightened",
        "L0 rose above pressure.tightenPercent: newcomers need a higher value density; if it lasts,"
        " make tiers.hbm larger or raise the hbm threshold",
    ),
)

log = structlog.get_logger("kvtier.server")


class PressureLog:
    """Remembers the counts it saw, per trust domain."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], int] = {}

    def look(self, domain: str, counters: Mapping[str, int], used: int, capacity: int) -> None:
        """``counters``: of the domain's cache; ``used``, ``capacity``: bytes of L0 now."""
        for counter, message in _RISES:
            now, before = counters.get(counter, 0), self._seen.get((domain, counter), 0)
            self._seen[domain, counter] = now
            if now > before:
                log.warning(
                    message, domain=domain, times=now - before, used_bytes=used,
                    capacity_bytes=capacity,
                )  # fmt: skip
