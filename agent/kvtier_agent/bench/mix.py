"""What `recovery` reads again: a checkpoint, and a log behind it of a known part of that.

Seen from outside, by the files of the volume's folder; brought about by pages that are deleted and
stored again, which keeps their number.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from kvtier_agent.bench.errors import BenchError

LOG_PART: Final = 0.1
"""Of a checkpoint."""
CHECKPOINT_SECONDS: Final = 10.0
"""A checkpoint is due, looked for each second, and written at a pace."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Bytes that a start reads: the newest checkpoint, and what is written in the logs behind it.
    `number`: of the checkpoint, -1: there is none."""

    number: int
    checkpoint_bytes: int
    log_bytes: int

    @classmethod
    def of(cls, volume: Path) -> Mix:
        """As it lies below the run's folder on the volume now."""
        checkpoints = sorted(volume.rglob("checkpoint-*.kv"))
        number, size = -1, 0
        if checkpoints:
            number, size = _number(checkpoints[-1]), _written(checkpoints[-1])
        logs = [log for log in volume.rglob("journal-*.log") if _number(log) >= number]
        return cls(number, size, sum(_written(log) for log in logs))


def bring_about(volume: Path, churn: Callable[[], None], seconds: float) -> Mix:
    """Call `churn`, which makes the log longer, until a new checkpoint is there and then until the
    log is `LOG_PART` of it. Raises `BenchError` when that takes longer than `seconds`."""
    end = time.monotonic() + seconds
    first = found = Mix.of(volume)
    while found.number == first.number or found.log_bytes < LOG_PART * found.checkpoint_bytes:
        if time.monotonic() > end:
            raise BenchError(f"the agent wrote no checkpoint within {seconds:g} s")
        churn()
        found = Mix.of(volume)
    return found


def _number(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _written(path: Path) -> int:
    """Bytes up to the last one that is not 0: files are laid out before they are written to."""
    try:
        used = np.flatnonzero(np.fromfile(path, np.uint8))
    except FileNotFoundError:  # a checkpoint has just replaced it
        return 0
    return int(used[-1]) + 1 if used.size else 0
