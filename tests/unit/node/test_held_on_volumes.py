"""What kvtier's own files take is counted right or not at all: a part of it would shrink a tier."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from kvtier_agent.node.places import held_bytes
from kvtier_agent.node.volumes import measure_volumes
from kvtier_agent.storage.core import Core
from kvtier_agent.storage.volume_health import Trouble

SIZE = 8192


class Entry:
    """One of a folder, as `os.scandir` gives it, whose stat fails with `error`."""

    def __init__(self, entry: os.DirEntry[str], error: int) -> None:
        self.name, self._entry, self._error = entry.name, entry, error

    def stat(self, *, follow_symlinks: bool) -> os.stat_result:
        if self._error:
            raise OSError(self._error, os.strerror(self._error))
        return self._entry.stat(follow_symlinks=follow_symlinks)


class OneCore:
    """A trust domain whose segments on data0 take `held` bytes."""

    def __init__(self, held: int, trouble: Trouble | None = None) -> None:
        self._held, self._trouble = held, trouble

    def try_volumes_again(self) -> None:
        pass

    def trouble(self, name: str) -> Trouble | None:
        return self._trouble

    def holds(self, name: str) -> bool:
        return True

    def volumes(self) -> list[tuple[str, int, str]]:
        return [("data0", self._held, self._trouble.reason if self._trouble else "")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of one trust domain on volume data0, with three files."""
    made = tmp_path / "kvtier" / "default"
    made.mkdir(parents=True)
    for name in "abc":
        (made / name).write_bytes(bytes(SIZE))
    return made


@pytest.fixture
def second_fails(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The error with which the second file of a folder is looked at."""
    error, scan = [errno.ENOENT], os.scandir

    class Scan:
        def __init__(self, path: Any) -> None:
            self._path = path

        def __enter__(self) -> Iterator[Any]:
            with scan(self._path) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
            return iter([Entry(e, error[0] if i == 1 else 0) for i, e in enumerate(found)])

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(os, "scandir", Scan)
    return error


def measure(mount: Path, core: OneCore) -> tuple[Any, dict[str, str]]:
    found, said = measure_volumes(
        {"data0": mount}, ["default"], [cast(Core, core)], clock=lambda: 0.0
    )
    return found.get("data0"), said


def test_a_file_that_went_away_is_not_counted_and_the_others_are(
    folder: Path, second_fails: list[int]
) -> None:
    assert held_bytes(folder) == 2 * SIZE
    assert held_bytes(folder / "gone") == 0


def test_what_cannot_be_counted_makes_a_volume_broken_rather_than_smaller(
    tmp_path: Path, folder: Path, second_fails: list[int]
) -> None:
    second_fails[0] = errno.EIO
    found, broken = measure(tmp_path, OneCore(3 * SIZE))
    assert found is None
    assert broken == {"data0": f"{tmp_path}: Input/output error"}


def test_one_that_fails_anyway_is_judged_by_that(
    tmp_path: Path, folder: Path, second_fails: list[int]
) -> None:
    second_fails[0] = errno.EIO
    trouble = Trouble("VolumeUnusable", "no answer", 1, 0.0, 9.0, 9.0, placing=False)
    found, broken = measure(tmp_path, OneCore(5 * SIZE, trouble))
    assert broken == {}
    assert (found.held, found.failing, found.lost) == (5 * SIZE, "no answer", False)
