"""What a run of `kvtier` that was ended might leave: folders and processes that name it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

FOLDERS = (Path("/dev/shm"), Path("/tmp"))


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


def eventually(condition: Callable[[], object], seconds: float = 30) -> bool:
    """Whether the condition holds within so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())
