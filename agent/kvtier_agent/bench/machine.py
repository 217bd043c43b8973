"""The circumstances of a measurement: versions, processor, load; and what a process used."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from kvtier_agent import native
from kvtier_agent.bench import fio

_PACKAGES: Final = ("kvtier", "numpy", "pyzmq", "msgspec", "xxhash")
_TICKS: Final = os.sysconf("SC_CLK_TCK")


def versions() -> dict[str, str]:
    """Of this package, of what the request path runs on, of Python, the kernel and fio."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    found["native extension"] = native.described()
    found["fio"] = _fio_version()
    return found


def _fio_version() -> str:
    """Of the baseline of `l2`, in its own words."""
    path = fio.find()
    if path is None:
        return "not installed"
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "does not say"
    return said.stdout.strip() or "does not say"


def machine() -> dict[str, Any]:
    """Processor, cores this process may use, memory."""
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": pages * page_bytes,
    }


def load_average() -> float:
    """Runnable processes over the last minute: figures of a busy machine are worth little."""
    return os.getloadavg()[0]


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and all its threads so far. OSError when it is gone."""
    # The name in parentheses may hold spaces; the fields are counted from its end.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def heap_bytes(pid: int) -> int:
    """Anonymous memory of a process, without shared memory and files. OSError when it is gone."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"process {pid} has no RssAnon")


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()
