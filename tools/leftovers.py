"""What runs that were ended might leave: folders and processes that name them; folders in memory
for tests, which the next test run removes where the process that made them is gone."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SHM = Path("/dev/shm")
FOLDERS = (SHM, Path("/tmp"))
_OWNED = re.compile(r"kvtier-test-(\d+)-")


def folders(command: str, pid: int) -> list[Path]:
    """Of this process's run of `kvtier COMMAND`."""
    return [one for folder in FOLDERS for one in folder.glob(f"kvtier-{command}-{pid}-*")]


def processes(command: str, pid: int) -> list[int]:
    """Processes whose command line names the folders of this process's run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if f"kvtier-{command}-{pid}-".encode() in line:
                found.append(int(entry.name))
    return found


def owned_name(rest: str = "") -> str:
    """The name (or its beginning) of a test's folder in memory, which says whose it is."""
    return f"kvtier-test-{os.getpid()}-{rest}"


def folder_in_memory() -> tempfile.TemporaryDirectory[str]:
    """A folder of this process's tests in memory, gone when it is left; see `sweep`."""
    return tempfile.TemporaryDirectory(prefix=owned_name(), dir=SHM)


def sweep(folder: Path = SHM) -> list[Path]:
    """Remove folders of tests whose process is gone, as after a kill; which these were."""
    gone = []
    for path in folder.iterdir() if folder.is_dir() else ():
        owner = _OWNED.match(path.name)
        if owner is not None and not Path("/proc", owner[1]).exists():
            shutil.rmtree(path, ignore_errors=True)
            gone.append(path)
    return gone


def eventually(condition: Callable[[], object], seconds: float = 30) -> bool:
    """Whether the condition holds within so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())
