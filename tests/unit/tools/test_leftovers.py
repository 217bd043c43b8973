"""Folders in memory of test runs that were killed go with the next run, all others stay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import leftovers


def test_a_folder_goes_when_its_process_is_gone(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    left = tmp_path / f"kvtier-test-{ended.pid}-abc" / "default"
    left.mkdir(parents=True)
    (left / "d.l1").write_bytes(b"page")
    stay = [
        *(tmp_path / name for name in (leftovers.owned_name("abc"), "kvtier-test-map")),
        *(tmp_path / name for name in ("kvtier-b77272d355d4", f"kvtier-replay-{ended.pid}-abc")),
    ]
    for path in stay:
        path.mkdir()
    assert leftovers.sweep(tmp_path) == [left.parent]
    assert sorted(tmp_path.iterdir()) == sorted(stay)


def test_the_folder_of_a_test_says_whose_it_is() -> None:
    with leftovers.folder_in_memory() as name:
        path = Path(name)
        assert path.parent == leftovers.SHM
        assert path.name.startswith(f"kvtier-test-{os.getpid()}-")
        leftovers.sweep()
        assert path.is_dir()
    assert not path.exists()
