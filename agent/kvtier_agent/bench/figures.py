"""Figures: rounds of a measurement, what they come to, and how they are shown. Pure.

A benchmark measures ours and its baseline in rounds whose order alternates, so that a machine
that drifts favours neither. The figure is the median of the rounds; the least and the most are
told beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

Measure = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and most of some rounds, in the unit of the figure."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, rounds: Sequence[float]) -> Spread:
        """Raises ValueError without any round."""
        if not rounds:
            raise ValueError("no rounds were measured")
        return cls(median(rounds), min(rounds), max(rounds))


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of a benchmark. `baseline` and `baseline_name`: None and why, where there is none.

    `extra`: what else was seen, such as `cpu_seconds_per_gb`, `p99_seconds`,
    `heap_bytes_per_page`.
    """

    name: str
    ours: Spread
    baseline: Spread | None
    baseline_name: str
    unit: str
    more_is_better: bool
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """Above 1: ours is better, whatever the unit. None without a baseline."""
        if self.baseline is None:
            return None
        ours, baseline = self.ours.median, self.baseline.median
        above, below = (ours, baseline) if self.more_is_better else (baseline, ours)
        return above / below if below else None

    def as_json(self) -> dict[str, Any]:
        baseline = self.baseline
        return {
            "name": self.name,
            "ratio": _rounded(self.ratio),
            "ours": _rounded(self.ours.median),
            "ours_range": [_rounded(self.ours.least), _rounded(self.ours.most)],
            "baseline": None if baseline is None else _rounded(baseline.median),
            "baseline_range": None
            if baseline is None
            else [_rounded(baseline.least), _rounded(baseline.most)],
            "baseline_name": self.baseline_name,
            "unit": self.unit,
            "extra": {name: _rounded(value) for name, value in self.extra.items()},
        }

    def as_lines(self) -> list[str]:
        """For people: the figure, and what else was seen."""
        ratio = "" if self.ratio is None else f"ratio {self.ratio:.3f}"
        lines = [f"{self.name:<26} {_shown(self.ours)} {self.unit:<8} {ratio}"]
        if self.baseline is not None:
            lines.append(f"{'':<26} {_shown(self.baseline)} {self.unit:<8} {self.baseline_name}")
        elif self.baseline_name:
            lines.append(f"{'':<26} no baseline: {self.baseline_name}")
        for name, value in self.extra.items():
            lines.append(f"{'':<26} {value:10.4g} {name}")
        return lines


@dataclass(frozen=True, slots=True)
class Report:
    """What one run of a benchmark found, and under which circumstances."""

    figures: tuple[Figure, ...]
    settings: dict[str, Any]
    versions: dict[str, str]
    machine: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """The contract of `kvtier bench NAME --json`."""
        return {
            "results": [figure.as_json() for figure in self.figures],
            "settings": self.settings,
            "versions": self.versions,
            "machine": self.machine,
        }

    def as_text(self) -> str:
        """For people: every figure with its baseline, then the circumstances."""
        lines = [line for figure in self.figures for line in figure.as_lines()]
        for title, facts in (
            ("settings", self.settings),
            ("versions", self.versions),
            ("machine", self.machine),
        ):
            lines.append(f"{title}: " + ", ".join(f"{k} {v}" for k, v in facts.items()))
        return "\n".join(lines)


def alternate(rounds: int, *sides: Measure) -> list[list[float]]:
    """Measure every side `rounds` times; in every other round the order is the reverse.

    Returns one list of `rounds` figures for each side, in the order of `sides`.
    """
    found: list[list[float]] = [[] for _ in sides]
    for number in range(rounds):
        order = range(len(sides)) if number % 2 == 0 else reversed(range(len(sides)))
        for side in order:
            found[side].append(sides[side]())
    return found


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` (0..1) of the values do not exceed. ValueError if empty."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1e9) * len(ordered) // 10**9) - 1))]


def _rounded(value: float | None) -> float | None:
    """Six significant digits: more would only be noise."""
    return None if value is None else float(f"{value:.6g}")


def _shown(spread: Spread) -> str:
    return f"{spread.median:10.4g} ({spread.least:.4g} to {spread.most:.4g})"
