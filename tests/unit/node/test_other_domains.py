"""What a trust domain left that is not served any more goes at the next start, nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kvtier_agent.node.other_domains import sweep_memory, sweep_volumes
from kvtier_agent.storage.recovery import MANIFEST_NAME
from kvtier_agent.storage.volume import Volume


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """A volume with pages of two domains and a folder that is nobody's."""
    for domain in ("alpha", "beta", "other"):
        folder = tmp_path / "data0" / "kvtier" / domain
        folder.mkdir(parents=True)
        (folder / "segment-00000001.kv").write_bytes(b"page")
        (folder / "notes.txt").write_text("mine")
        if domain != "other":
            (folder / MANIFEST_NAME).write_text(json.dumps({"layout": 0}))
    return tmp_path / "data0"


def test_pages_of_a_domain_that_is_gone_are_removed(volume: Path) -> None:
    swept = sweep_volumes({"data0": volume}, ["alpha"])
    assert swept == [str(volume / "kvtier" / "beta")]
    assert names(volume / "kvtier" / "beta") == ["lock", "notes.txt"]
    assert MANIFEST_NAME in names(volume / "kvtier" / "alpha")
    assert names(volume / "kvtier" / "other") == ["notes.txt", "segment-00000001.kv"]
    assert sweep_volumes({"data0": volume}, ["alpha"]) == []


def test_what_another_agent_holds_or_a_newer_one_wrote_stays(volume: Path) -> None:
    held = Volume("data0", volume, "beta", allow_root_filesystem=True)
    assert sweep_volumes({"data0": volume}, ["alpha"]) == []
    assert "segment-00000001.kv" in names(held.folder)
    held.close()
    (held.folder / MANIFEST_NAME).write_text(json.dumps({"layout": 99}))
    assert sweep_volumes({"data0": volume}, ["alpha"]) == []
    assert "segment-00000001.kv" in names(held.folder)


def test_a_volume_without_pages_or_that_is_not_there_is_no_error(tmp_path: Path) -> None:
    assert sweep_volumes({"data0": tmp_path, "data1": tmp_path / "gone"}, ["alpha"]) == []


def test_memory_and_sockets_of_a_domain_that_is_gone_are_removed(tmp_path: Path) -> None:
    arenas, run = tmp_path / "arenas", tmp_path / "run"
    arenas.mkdir()
    run.mkdir()
    for name in ("alpha", "beta"):
        for suffix in (".l0", ".l1", ".table"):
            (arenas / (name + suffix)).touch()
        for suffix in (".sock", ".life", ".pages"):
            (run / (name + suffix)).touch()
    for name in ("lock", "status.json", "somebody.sock"):
        (run / name).touch()
    assert sweep_memory(arenas, run, ["alpha"]) == ["beta"]
    assert names(arenas) == ["alpha.l0", "alpha.l1", "alpha.table"]
    assert names(run) == [
        *("alpha.life", "alpha.pages", "alpha.sock"),
        *("lock", "somebody.sock", "status.json"),
    ]
