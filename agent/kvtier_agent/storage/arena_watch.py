"""Arenas that a client cut short. Their pages fail verification from then on, in silence: so it is
said, once for each arena, and stands in the figures until the agent ends. Only a start heals it:
a file that is not as it was made is not taken over.

A cut shows in the file's length at once, and in pages that this process touched and found gone
(`ShmArena.lost_pages`) even when the file is as long as before by now.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import structlog

from kvtier_agent.cache.arena import ShmArena

log = structlog.get_logger("kvtier.storage.arena")


@dataclass(frozen=True, slots=True)
class ArenaLoss:
    """Of one arena. ``layer``: 0 or 1. ``lost_pages``: of 4 KiB, touched since they were gone;
    ``cut_bytes``: by how much the file was ever seen to be too short."""

    layer: int
    lost_pages: int = 0
    cut_bytes: int = 0

    def __bool__(self) -> bool:
        """Was anything lost?"""
        return bool(self.lost_pages or self.cut_bytes)


class ArenaWatch:
    """Of the arenas of one trust domain; on one thread."""

    def __init__(self, domain: str) -> None:
        self._domain = domain
        self._seen: dict[int, ArenaLoss] = {}

    def look(self, arenas: Iterable[tuple[int, Any]]) -> tuple[ArenaLoss, ...]:
        """What each arena lost so far. `arenas`: (layer, arena or None); memory of a device is
        nobody's to cut, and left out."""
        for layer, arena in arenas:
            if not isinstance(arena, ShmArena):
                continue
            before = self._seen.get(layer, ArenaLoss(layer))
            cut = max(before.cut_bytes, arena.cut_bytes)
            now = self._seen[layer] = ArenaLoss(layer, arena.lost_pages, cut)
            if now and not before:
                log.error(
                    "a client cut an arena short: what lay there are misses until the agent is "
                    "restarted",
                    domain=self._domain, file=str(arena.path), bytes_missing=now.cut_bytes,
                    pages_lost=now.lost_pages,
                )  # fmt: skip
        return tuple(self._seen.values())
