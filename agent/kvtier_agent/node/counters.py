"""Counters that never go back: what closed processes counted, plus what this one has.

The cache counts from zero in each process. Status and disk carry the sum over the life of the
state folder, so that whoever takes differences (per boot id) sees a restart as a gap, not as a
negative rate. Losing the last seconds before a kill is accepted: the sum is then too small by what
was counted since the last save, and never too large; only what was saved is shown.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["Counters", "total"]

Counters = Mapping[str, int]


def total(closed: Counters, current: Counters) -> dict[str, int]:
    """The sum, name by name; names of older versions are kept."""
    return {k: closed.get(k, 0) + current.get(k, 0) for k in sorted({*closed, *current})}
