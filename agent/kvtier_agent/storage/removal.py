"""Removing what a volume held: as long as the drive takes, and never on the cache thread."""

from __future__ import annotations

import threading

from kvtier_agent.storage.journal import Journal
from kvtier_agent.storage.segment import Segment

PATIENCE_SECONDS = 0.5
"""How long a revision waits for the files of a volume that leaves; then they go by and by."""


def remove_in_background(segments: list[Segment], journals: list[Journal]) -> None:
    """Close and remove these files; waits briefly."""
    remover = threading.Thread(
        target=_remove, args=(segments, journals), name="volume-leaves", daemon=True
    )
    remover.start()
    remover.join(PATIENCE_SECONDS)


def _remove(segments: list[Segment], journals: list[Journal]) -> None:
    for segment in segments:
        segment.remove()
    for journal in journals:
        journal.close(remove=True)
