"""One agent a folder: a lock file in it, with the process that holds it written down for people."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

__all__ = ["FolderLockError", "lock_folder"]

LOCK_NAME = "agent.lock"


class FolderLockError(Exception):
    """The folder cannot be had; the message says what to do."""


def lock_folder(folder: Path, what: str, option: str) -> int:
    """The open, locked file in a folder that is there. ``what``: it is, for people; ``option``: by
    which another one is chosen. Raises FolderLockError."""
    try:
        lock = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as e:
        raise FolderLockError(
            f"{what} {folder}: {e.strerror}; choose a folder you may write with {option}"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.pread(lock, 32, 0).decode(errors="replace").strip()
        os.close(lock)
        raise FolderLockError(
            f"{what} {folder} is in use by another agent"
            + (f" (pid {owner})" if owner else "")
            + f"; stop it, or choose another folder with {option}"
        ) from None
    with contextlib.suppress(OSError):  # a full disk: the lock holds without
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock
