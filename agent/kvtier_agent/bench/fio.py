"""fio as the baseline of `l2`: found, asked in its best setting, understood.

The best setting differs from machine to machine (huge pages may be there or not), so a few are
tried for a moment each, and the fastest is the baseline. All have io_uring, O_DIRECT, fixed buffers
and registered files.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from kvtier_agent.bench.errors import BenchError

Direction = Literal["read", "write"]
GB: Final = 1e9

MISSING: Final = "fio is not installed; on Debian: apt-get install fio"
Words = tuple[str, ...]
PLAIN: Final[Words] = ("--iomem=mmap",)
#: Where fio's buffers lie: huge pages, transparent huge pages, ordinary ones.
CANDIDATES: Final[tuple[Words, ...]] = (
    ("--iomem=mmaphuge",),
    ("--iomem=mmap", "--thp=1"),
    PLAIN,
)


@dataclass(frozen=True, slots=True)
class Job:
    """One run over a file. `size` and `unit` in bytes; `depth`: units in flight."""

    file: Path
    size: int
    unit: int
    depth: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What fio measured."""

    gb_per_second: float
    cpu_seconds_per_gb: float


def find() -> str | None:
    """The path of fio, None where it is not installed."""
    return shutil.which("fio")


def arguments(
    fio: str, job: Job, direction: Direction, memory: Sequence[str], *, engine: str = "io_uring"
) -> list[str]:
    """The command line of one pass over the file."""
    fixed = ("--fixedbufs=1", "--registerfiles=1") if engine == "io_uring" else ()
    return [
        fio,
        *("--name=bench", f"--filename={job.file}", f"--size={job.size}"),
        *(f"--rw={direction}", f"--bs={job.unit}", f"--iodepth={job.depth}"),
        *(f"--ioengine={engine}", "--direct=1", "--numjobs=1", "--thread=1"),
        # The file is laid out before and stays as long as it is.
        *("--fallocate=none", "--overwrite=1", "--invalidate=0", "--randrepeat=1"),
        *("--output-format=json", *fixed, *memory),
    ]


def read_answer(text: str, direction: Direction) -> Answer:
    """What fio said in JSON. Raises `BenchError` with its own words where it failed."""
    begin = text.find("{")
    try:
        found: dict[str, Any] = json.loads(text[begin : text.rindex("}") + 1])
        job = found["jobs"][0]
        side = job[direction]
        bandwidth, moved = float(side["bw_bytes"]), float(side["io_bytes"])
        busy = (float(job["usr_cpu"]) + float(job["sys_cpu"])) / 100
        seconds = float(job["job_runtime"]) / 1000
        error = int(job["error"])
    except (ValueError, KeyError, IndexError, TypeError):
        words = " ".join(text.split())
        raise BenchError(f"fio failed: {words[:300] or 'it said nothing'}") from None
    if error or not moved:
        raise BenchError(f"fio failed with error {error}: {' '.join(text[:begin].split())[:300]}")
    return Answer(bandwidth / GB, busy * seconds / (moved / GB))
