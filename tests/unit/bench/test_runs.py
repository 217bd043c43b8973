"""Every benchmark runs to its end, says what the contract says, and leaves nothing behind."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvtier_agent.bench import machine

SMALL = {
    "memory": ("--page-bytes", "64Ki", "--pages", 8, "--batch", 4),
    "lookup": ("--pages", 1024, "--calls", 3, "--clients", 2),
    "l2": ("--page-bytes", "64Ki", "--pages", 256, "--depth", 4, "--clients", 2),
    "recovery": ("--pages", 1000),
    "endtoend": ("--page-bytes", "64Ki", "--prompt-tokens", 1024, "--prompts", 2),
}
NAMES = {
    "memory": ["put", "get"],
    "lookup": ["roundtrip_1024", "roundtrip_1024_2_clients"],
    "l2": ["read", "write"],
    "recovery": ["pages_1e3", "dram_pages_16384"],
    "endtoend": ["store", "retrieve"],
}
EXTRA = {
    "memory": {"cpu_seconds_per_gb", "p99_seconds"},
    "lookup": {"p99_seconds"},
    "l2": {"cpu_seconds_per_gb"},
    "recovery": set(),
    "endtoend": {"p99_seconds"},
}


@pytest.fixture
def without_fio(tmp_path: Path) -> Path:
    """A PATH on which there is Python only, so that the run is the same on every machine."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("python3",):
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    return folder


@pytest.mark.parametrize("name", list(SMALL))
def test_a_benchmark_answers_with_the_contract(
    bench: Callable[..., Any], without_fio: Path, tmp_path: Path, name: str
) -> None:
    drive = ("--volume", tmp_path) if name in ("l2", "recovery") else ()
    done = bench(name, *SMALL[name], *drive, "--rounds", 2, "--json", "-", path=without_fio)
    assert done.status == 0, done.err
    results = done.json["results"]
    assert [result["name"] for result in results] == NAMES[name]
    for result in results:
        assert result["ours"] > 0
        assert result["unit"] in ("GB/s", "seconds")
        assert result["ours_range"][0] <= result["ours"] <= result["ours_range"][1]
        assert result["extra"].keys() >= EXTRA[name]
        if result["baseline"] is None:
            assert result["ratio"] is None
        else:
            assert result["ratio"] > 0
    assert done.json["settings"]["rounds"] == 2
    assert {"kvtier", "python", "kernel"} <= done.json["versions"].keys()
    assert done.json["versions"]["fio"] == "not installed"
    assert {"cores", "load_average_before", "load_average_after"} <= done.json["machine"].keys()
    if name == "recovery":
        volume, dram = (result["extra"] for result in results)
        assert {"heap_bytes_per_page", "shared_bytes_per_page"} <= volume.keys()
        assert dram["pages_in_dram"] > 0
        assert volume["log_bytes"] >= 0.1 * volume["checkpoint_bytes"] > 0
    if name == "l2":
        assert "apt-get install fio" in results[0]["baseline_name"]
    left = [*Path("/dev/shm").glob("kvtier-bench-*"), *Path("/tmp").glob("kvtier-bench-*")]
    assert [one for one in left if f"-{_pid(done.err)}-" in one.name] == []
    assert list(tmp_path.glob("kvtier-bench-*")) == []


def test_the_version_of_fio_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "fio"
    program.write_text("#!/bin/sh\necho fio-3.36\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.versions()["fio"] == "fio-3.36"
    program.unlink()
    assert machine.versions()["fio"] == "not installed"


def _pid(text: str) -> str:
    """The process of the run, as its first line says."""
    return text.split("process ", 1)[1].split()[0].rstrip(":,")
