"""The lock of a folder does not hang on the note of who holds it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from kvtier_agent.folder_lock import FolderLockError, lock_folder


def test_a_full_disk_keeps_nobody_from_locking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    lock = lock_folder(tmp_path, "state folder", "--state-dir")
    try:
        with pytest.raises(FolderLockError, match="in use by another agent; stop it, or choose"):
            lock_folder(tmp_path, "state folder", "--state-dir")
    finally:
        os.close(lock)
