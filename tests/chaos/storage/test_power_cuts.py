"""Power cuts at any change that L2 makes to a drive, simulated: the full run is `make crash`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from crash.check import Tally, cut_everywhere, empty_folder, folder_of, record, start
from crash.disk import Change, Cutter, RecordingIO
from crash.rings import RecordingRings
from crash.workload import Settings, Workload
from kvtier_agent.storage.fileio import FileIO


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    (tmp_path / "cut" / "data0").mkdir(parents=True)
    return tmp_path / "cut"


def work(tmp_path: Path, seed: int, steps: int = 120, *, rings: bool = False) -> list[Change]:
    (tmp_path / "work").mkdir()
    return record(tmp_path / "work", seed, steps, rings=rings)


@pytest.mark.parametrize(
    ("seed", "rings"),
    [
        (1, False), (6, True), (13, True), (17, False),
        pytest.param(1, True, marks=pytest.mark.slow),
        pytest.param(13, False, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_cut_anywhere_breaks_no_promise(
    tmp_path: Path, cut: Path, seed: int, rings: bool
) -> None:
    tally = Tally()
    cut_everywhere(work(tmp_path, seed, rings=rings), cut, seed, tally, every=10)
    assert tally.problems == []
    assert tally.bad == 0
    assert tally.cuts > 30
    assert tally.pages_right > 300


def test_pages_that_go_by_rings_do(tmp_path: Path) -> None:
    io = RecordingRings(folder_of(tmp_path), seed=1)
    workload = Workload(tmp_path, io, seed=1, steps=40)
    workload.run()
    assert io.transfers > 50


@pytest.mark.parametrize("rings", [pytest.param(False, marks=pytest.mark.slow), True])
def test_pages_that_never_landed_are_told_from_bad_ones(
    tmp_path: Path, cut: Path, rings: bool
) -> None:
    """Under `async` a cut leaves many; each is judged by what lies in its slot."""
    tally = Tally()
    trace = work(tmp_path, 5, steps=60, rings=rings)
    cut_everywhere(trace, cut, 5, tally, every=6, again=0.0)
    assert tally.problems == []
    assert tally.unwritten > 20
    assert tally.misjudged == 0


def test_a_journal_that_was_given_up_does_not_come_back(tmp_path: Path, cut: Path) -> None:
    """Under `none` an agent that starts again counts generations anew: an old journal would call
    sound pages of the new ones bad."""
    (tmp_path / "work").mkdir()
    io = RecordingIO(folder_of(tmp_path / "work"))
    workload = Workload(tmp_path / "work", io, seed=0, steps=1)
    workload.durability = "async"

    def some_pages() -> None:
        for _ in range(8):
            workload._put()
            workload._settle()
        workload._drop()

    workload._reconfigure()
    some_pages()
    workload.durability = "none"
    workload._reconfigure()
    some_pages()
    workload._stop()
    begun = len(io.trace)
    some_pages()
    tally = Tally()
    for seed in range(60):
        cutter = Cutter(io.trace)
        while cutter.at < begun + seed % (len(io.trace) - begun):
            cutter.forward()
        cutter.cut(random.Random(seed), empty_folder(cut))
        start(cut, FileIO(), Settings(workload.cap_bytes, "async"), set(), tally, f"cut {seed}")
    workload.core.close()
    assert tally.problems == []


def without(trace: list[Change], what: str) -> list[Change]:
    """As if the drive (or the agent) left out these."""
    return [change for change in trace if change.what != what]


@pytest.mark.parametrize(
    ("what", "rings"),
    [
        ("flush", True), ("folder", False),
        pytest.param("flush", False, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_the_simulator_notices_what_is_not_flushed(
    tmp_path: Path, cut: Path, what: str, rings: bool
) -> None:
    tally = Tally()
    trace = without(work(tmp_path, 6, rings=rings), what)
    cut_everywhere(trace, cut, 6, tally, every=20, again=0.0)
    assert tally.promises_broken > 0
    assert tally.wrong_bytes == tally.starts_failed == tally.cap_broken == 0


def test_the_model_of_the_disk_is_the_disk_when_all_is_flushed(tmp_path: Path, cut: Path) -> None:
    """With nothing pending a cut leaves just what the real file system shows."""
    trace = work(tmp_path, 3)
    files = {change.file for change in trace}
    cutter = Cutter([*trace, *(Change("flush", n) for n in files), Change("folder")])
    while cutter.at < len(cutter.trace):
        cutter.forward()
    cutter.cut(random.Random(0), cut)
    real = tmp_path / "work" / "data0" / "kvtier" / "d"
    left = {p.name: p for p in real.iterdir() if p.name != "lock"}
    assert {p.name for p in cut.iterdir()} - {"data0"} == set(left)
    for name, path in left.items():
        assert (cut / name).read_bytes() == path.read_bytes(), name


def test_a_recorder_takes_over_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 5000)
    cutter = Cutter(RecordingIO(tmp_path).trace)
    while cutter.at < len(cutter.trace):
        cutter.forward()
    (tmp_path / "out").mkdir()
    cutter.cut(random.Random(0), tmp_path / "out")
    assert (tmp_path / "out" / "file").read_bytes() == b"x" * 5000
