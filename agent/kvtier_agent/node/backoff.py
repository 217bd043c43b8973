"""How long to wait before the next try: exponential with full jitter, bounded, and pure."""

from __future__ import annotations

from typing import Final

__all__ = ["delay"]

FIRST_SECONDS: Final = 0.25
LONGEST_SECONDS: Final = 8.0
"""Short enough that a node catches up within ten seconds of the API server's return."""


def delay(
    failures: int, chance: float, *, first: float = FIRST_SECONDS, longest: float = LONGEST_SECONDS
) -> float:
    """Seconds to wait after the ``failures``-th failure in a row (1 or more), between half and
    all of ``first * 2 ** (failures - 1)``, at most ``longest``. ``chance`` in [0, 1) is drawn by
    the caller, so that many agents do not come back in step."""
    whole = min(longest, first * 2.0 ** min(max(failures, 1) - 1, 30))
    return whole * (0.5 + chance / 2.0)
