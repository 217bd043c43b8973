"""Where a newcomer goes: a pure function of what it is worth and what room there is.

A page goes to the highest tier that admits it (value density at least the tier's threshold) and
has room; a page that only L2 admits passes through an L1 slot and goes straight down. Exempt pages
ask no threshold. A partial page is kept in L0 or not at all. Pages behind a refused one are refused
for the same reason: a prefix with a hole is of no use to an engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]

VALUE = 254
"""Refused: no tier admits it."""
SPACE = 253
"""Refused: the only tier for it has no room."""
QUOTA = 252
"""Refused: its tenant's quota of the only tier for it is used up."""
REFUSED = 252
"""What is not below is no tier."""


@dataclass(frozen=True, slots=True)
class L0Room:
    """Slots of L0 up to the tighten line (below 0: tightened), up to the demote line, and those
    that are there right now (fewer while a growth waits for memory)."""

    tighten: int
    demote: int
    all: int


def place(
    admits: tuple[Mask, Mask, Mask],
    exempt: Mask,
    partial: Mask,
    density: NDArray[np.float64],
    median: float,
    room: L0Room,
) -> NDArray[np.uint8]:
    """Per page, in prefix order: 0, 1, VALUE or SPACE. L1's room is the caller's to check.

    `admits`: per tier; a tier that does not exist admits nothing. `density`: in L0; `median`: of
    recent admissions.
    """
    out = np.full(len(exempt), VALUE, dtype=np.uint8)
    out[(admits[1] | admits[2]) & ~partial] = 1
    out[partial & (admits[0] | exempt)] = SPACE  # unless L0 takes it below
    out[exempt & ~partial] = 1
    ordinary = np.flatnonzero(admits[0] & ~exempt)
    free = np.flatnonzero(exempt)[: room.all]
    out[free] = 0
    line = room.tighten
    if line < 0:  # tightened: only the better half still enters
        ordinary = ordinary[density[ordinary] >= median]
        line = room.demote
    out[ordinary[: max(0, min(line, room.all) - free.size)]] = 0
    return out


def within_quota(
    tier: NDArray[np.uint8], lower: Mask, exempt: Mask, room: tuple[int, int]
) -> NDArray[np.uint8]:
    """Pages for which their tenant has no room in L0 go to L1 where they may (`lower`), those for
    which it has none there either are refused. `room`: slots of L0 and L1 that its quotas leave."""
    beyond = np.flatnonzero((tier == 0) & ~exempt)[max(0, room[0]) :]
    tier[beyond] = np.where(lower[beyond], 1, QUOTA)
    tier[np.flatnonzero((tier == 1) & ~exempt)[max(0, room[1]) :]] = QUOTA
    return tier


def close_holes(tier: NDArray[np.uint8], exempt: Mask) -> NDArray[np.uint8]:
    """Pages behind the first refused one get its refusal (exempt pages apart)."""
    refused = np.flatnonzero(tier >= REFUSED)
    if refused.size:
        start = int(refused[0])
        behind = ~exempt[start:]
        tier[start:][behind] = tier[start]
    return tier
