"""The folders of one agent: made, checked and locked before anything is put into them.

A mistake here is the user's and is said in one line (`PlaceError`). The run folder itself is made
and locked by the server (``server.rundir``).
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from kvtier_agent.folder_lock import FolderLockError, lock_folder

__all__ = ["PlaceError", "Places", "arena_folder", "held_bytes"]


class PlaceError(Exception):
    """A folder cannot be used; one line that says what to do."""


@dataclass
class Places:
    """``state``: what outlives a restart. ``arenas``: this agent's own folder in shared memory."""

    state: Path
    arenas: Path
    _lock: int

    @classmethod
    def open(cls, state_dir: Path, shm_dir: Path, run_dir: Path) -> Places:
        """Makes both folders and locks the first. Raises `PlaceError`."""
        _make(state_dir, "state folder", "--state-dir", 0o700)
        lock = _locked(state_dir)
        if not shm_dir.is_dir():
            raise PlaceError(
                f"shared-memory folder {shm_dir} does not exist; mount a tmpfs there or choose "
                "another with --shm-dir"
            )
        arenas = arena_folder(shm_dir, run_dir)
        _make(arenas, "shared-memory folder", "--shm-dir", 0o755)
        return cls(state_dir, arenas, lock)

    def close(self) -> None:
        """Gives up the lock, and the arena folder where it is empty."""
        with contextlib.suppress(OSError):  # it may hold what outlives the process on purpose
            self.arenas.rmdir()
        os.close(self._lock)


def arena_folder(shm_dir: Path, run_dir: Path) -> Path:
    """This agent's folder in shared memory. Named after the run folder, so that several agents on
    one machine share nothing, and one that was killed leaves what its successor finds and clears.
    """
    name = blake2b(os.fsencode(run_dir.resolve()), digest_size=6).hexdigest()
    return shm_dir / f"kvtier-{name}"


def held_bytes(folder: Path, suffixes: tuple[str, ...] = ("",)) -> int:
    """Bytes that the files in a folder take, holes left out; only those whose name ends so. None in
    a folder that is not there. Raises OSError: a part of the sum would pass for less held."""
    total = 0
    nowhere = contextlib.suppress(FileNotFoundError, NotADirectoryError)
    with nowhere, os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.endswith(suffixes):
                continue
            with contextlib.suppress(FileNotFoundError):  # it went away while we looked
                total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total


def _make(folder: Path, what: str, option: str, mode: int) -> None:
    hint = f"choose a folder you may write with {option}"
    try:
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
    except OSError as e:
        raise PlaceError(f"{what} {folder}: {e.strerror}; {hint}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PlaceError(f"{what} {folder}: no permission to write; {hint}")
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        raise PlaceError(f"{what} {folder}: read-only filesystem; {hint}")


def _locked(folder: Path) -> int:
    try:
        return lock_folder(folder, "state folder", "--state-dir")
    except FolderLockError as e:
        raise PlaceError(str(e)) from None
