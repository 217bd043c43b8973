"""What the tests of the launcher and of the builder share."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def programs_in() -> Callable[[Path], list[int]]:
    """The ids of the processes whose working folder is the given one."""

    def find(folder: Path) -> list[int]:
        found = []
        for process in Path("/proc").iterdir():
            # Processes come and go while we look, and other users' are none of ours.
            with contextlib.suppress(OSError):
                if process.name.isdigit() and (process / "cwd").readlink() == folder:
                    found.append(int(process.name))
        return found

    return find


@pytest.fixture
def write_program(tmp_path: Path) -> Callable[[Path, str], Path]:
    """Write an executable shell script."""

    def write(path: Path, text: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    return write
