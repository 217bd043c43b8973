"""The behaviours of `make conformance`: a cache that keeps its word passes them, each defect fails
the one that is about it, and kvtier itself passes them all."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks" / "conformance"
DEFECTS = {
    "serves-flipped": "bit flip in a stored page",
    "counts-from-zero": "disk cap over 4 restarts",
    "dies-green": "eviction thread killed",
    "loses-some": "working set 4x DRAM, every key asked again",
    "forgets": "restart and re-read",
    "loses-the-newest": "store while full",
    "serves-half-written": "client killed mid-store",
}


@pytest.fixture
def behaviours(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    import behaviours

    clock = itertools.count()
    monkeypatch.setattr(
        behaviours, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None)
    )
    return behaviours


class Disk:
    """What outlives a life of the cache below."""

    def __init__(self) -> None:
        self.pages: dict[int, bool] = {}
        """Number -> are its bytes right?"""


class Cache:
    """A cache of one tier in a dictionary, with one defect or none."""

    def __init__(self, disk: Disk, defect: str) -> None:
        self.disk, self.defect = disk, defect
        self.dead = False
        self.folder = Path("nowhere")
        self.cap = 0
        self.put_here = 0

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def open(self, dram_pages: int, disk_pages: int) -> dict[str, Any]:
        self.cap = disk_pages
        if self.defect == "forgets":
            self.disk.pages.clear()
        return {}

    def kill(self) -> None:
        pass

    def send(self, order: str, **arguments: Any) -> None:
        self.ask(order, **arguments)

    def disk_bytes(self) -> int:
        return len(self.disk.pages) << 20

    def flip_bits(self, numbers: list[int], chance: object) -> list[int]:
        for number in numbers:
            self.disk.pages[number] = False
        return numbers

    def ask(self, order: str, seconds: float = 0, **arguments: Any) -> dict[str, Any]:
        return dict(getattr(self, f"_{order}")(**arguments))

    def _put(self, first: int, count: int) -> dict[str, Any]:
        if self.dead and self.defect == "dies-green":
            return {"stored": []}
        pages = self.disk.pages
        for number in range(first, first + count):
            if not (self.defect == "loses-the-newest" and number > 300):
                pages[number] = True
            self.put_here += 1
            held = self.put_here if self.defect == "counts-from-zero" else len(pages)
            if held > self.cap:
                del pages[next(iter(pages))]
        return {"stored": list(range(first, first + count))}

    def _get(self, numbers: list[int]) -> dict[str, Any]:
        found: dict[str, list[int]] = {"right": [], "wrong": [], "missing": []}
        for number in numbers:
            right = self.disk.pages.get(number)
            if right is None or (self.defect == "loses-some" and number % 50 == 49):
                found["missing"].append(number)
            elif right:
                found["right"].append(number)
            else:
                found["wrong" if self.defect == "serves-flipped" else "missing"].append(number)
        return found

    def _settle(self) -> dict[str, Any]:
        return {}

    _close = _settle

    def _kill_eviction(self) -> dict[str, Any]:
        self.dead = True
        return {"what": "it was told so"}

    def _health(self) -> dict[str, Any]:
        return {"healthy": not self.dead or self.defect == "dies-green", "says": "so"}

    def _kill_clients(self, times: int, first: int, count: int) -> dict[str, Any]:
        found = count if self.defect == "serves-half-written" else 0
        return {"killed": times, "found": found, "what": "begun"}


def start(defect: str) -> Callable[[], Cache]:
    disk = Disk()
    return lambda: Cache(disk, defect)


def test_a_cache_that_keeps_its_word_passes(behaviours: Any) -> None:
    for name in behaviours.BEHAVIOURS:
        verdict = behaviours.judge(name, start("none"))
        assert verdict.passed, f"{name}: {verdict.seen}"


@pytest.mark.parametrize(("defect", "name"), DEFECTS.items(), ids=DEFECTS)
def test_a_defect_fails_the_behaviour_it_is_about(behaviours: Any, defect: str, name: str) -> None:
    verdict = behaviours.judge(name, start(defect))
    assert verdict.passed is False, verdict.seen


def test_a_system_that_breaks_down_has_failed(
    behaviours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Cache:
        raise behaviours.AdapterError("open: it cannot")

    assert behaviours.judge("restart and re-read", broken) == behaviours.Verdict(
        False, "open: it cannot"
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kvtier_passes_every_row(tmp_path: Path) -> None:
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(FOLDER / "run.py"), "--only", "kvtier", "--json", "-"],
        capture_output=True, text=True,
    )  # fmt: skip
    print(done.stderr[-3000:], f"{time.monotonic() - begin:.0f} s")
    results = json.loads(done.stdout)["results"]["kvtier"]
    assert {name: v["seen"] for name, v in results.items() if not v["passed"]} == {}
    assert len(results) >= 8
    assert done.returncode == 0
