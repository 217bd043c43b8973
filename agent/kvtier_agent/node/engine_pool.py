"""How large the engines' own KV pool is, also while not all of them are here.

L1 is a multiple of it, and a tier that shrinks drops pages. So an engine that restarts leaves its
part in: the largest sum ever registered counts. And so that a restart of the agent does not shrink
L1 before its engines are back, each by its ranks, what the process before knew counts as well: for
an hour, and until the first one has come. After that what came is what there is.
"""

from __future__ import annotations

from typing import Final

__all__ = ["RETURN_SECONDS", "EnginePool"]

RETURN_SECONDS: Final = 3600.0
"""Engines that restart together with the agent, as at a node's upgrade, have loaded their models
by then."""


class EnginePool:
    """``remembered``: bytes that the process before knew of, 0 where there was none; ``now``:
    monotonic seconds, here and in `bytes_at`."""

    def __init__(self, remembered: int, now: float) -> None:
        self._remembered = remembered
        self._largest = 0
        self._until = now + RETURN_SECONDS

    def bytes_at(self, registered: int, now: float) -> int:
        """What counts now that engines of ``registered`` bytes are here; 0: none ever was."""
        self._largest = max(self._largest, registered)
        if self._largest == 0 or now < self._until:
            return max(self._largest, self._remembered)
        return self._largest
