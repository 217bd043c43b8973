"""The memory limit as control groups of both versions state it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from kvtier_agent.node import facts
from kvtier_agent.node.facts import MemoryLimit

GI = 1 << 30


def machine(root: Path, membership: str, limits: dict[str, str]) -> tuple[Path, Path]:
    proc, cgroup = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(membership)
    (proc / "meminfo").write_text(
        f"MemTotal: {64 * GI // 1024} kB\nMemFree: 1 kB\nMemAvailable: {7 * GI // 1024} kB\n"
        "HugePages_Total: 0\n"
    )
    for path, text in limits.items():
        file = cgroup / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return proc, cgroup


def limit(root: Path, membership: str, limits: dict[str, str]) -> MemoryLimit | None:
    proc, cgroup = machine(root, membership, limits)
    return facts.memory_limit(2 * GI, proc, cgroup)


POD = "the Pod's memory limit"


@pytest.mark.parametrize(
    ("membership", "limits", "size", "source"),
    [
        pytest.param("0::/\n", {"memory.max": f"{8 * GI}\n"}, 8 * GI, POD, id="v2 in a container"),
        pytest.param(
            "0::/a/b\n",
            {"a/b/memory.max": "max\n", "a/memory.max": f"{4 * GI}\n"},
            4 * GI,
            POD,
            id="v2, the parent's limit holds",
        ),
        pytest.param(
            "9:cpu:/x\n4:memory:/x\n0::/\n",
            {"memory/x/memory.limit_in_bytes": f"{6 * GI}\n"},
            6 * GI,
            POD,
            id="v1",
        ),
        pytest.param(
            "4:memory:/x\n",
            {"memory/x/memory.limit_in_bytes": "9223372036854771712\n"},
            64 * GI,
            "this machine's memory",
            id="v1 unlimited",
        ),
        pytest.param("0::/\n", {}, 64 * GI, "this machine's memory", id="no file"),
        pytest.param(
            "0::/\n",
            {"memory.max": f"{128 * GI}"},
            64 * GI,
            "this machine's memory",
            id="a limit above the machine",
        ),
    ],
)
def test_memory_limit(
    tmp_path: Path, membership: str, limits: dict[str, str], size: int, source: str
) -> None:
    available = None if source == POD else 7 * GI
    assert limit(tmp_path, membership, limits) == MemoryLimit(size, source, 2 * GI, available)


def test_without_proc_there_is_no_figure(tmp_path: Path) -> None:
    assert facts.memory_limit(2 * GI, tmp_path, tmp_path) is None


def test_a_device_that_is_not_there_is_an_error_and_auto_falls_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(LookupError):
        facts.find_device("cuda", 2 * GI)
    assert facts.find_device("auto", 2 * GI) == facts.Device("cpu", (2 * GI,))
    assert facts.find_device("cpu", 3 * GI).first == 3 * GI


def test_every_visible_device_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    memories = (80 * GI, 24 * GI)
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda i: SimpleNamespace(total_memory=memories[i])
    )
    assert facts.find_device("cuda", 2 * GI) == facts.Device("cuda", memories)


def test_room_counts_what_we_hold_ourselves(tmp_path: Path) -> None:
    free = facts.available_in(tmp_path, 0)
    assert facts.available_in(tmp_path, 5) - free < 1 << 30
    assert facts.volume_facts(tmp_path).total > 0


def test_page_tables_keep_room_to_grow_beside_the_arenas() -> None:
    assert facts.beside_tables(640 * GI, 0, 2 * GI) == 638 * GI, "all that they may ever take"
    assert facts.beside_tables(64 * GI, 0, 2 * GI) == 63 * GI, "a 64th of a small one"
    grown = facts.beside_tables(63 * GI, 1 * GI, 2 * GI)
    assert grown == 63 * GI, "what they took is not set aside twice"
    assert facts.beside_tables(0, 1 * GI, 2 * GI) == 0


def test_a_filesystem_that_refuses_writes_is_read_only_however_it_is_mounted(
    tmp_path: Path,
) -> None:
    assert not facts.volume_facts(tmp_path).read_only
    assert facts.volume_facts(tmp_path, refuses=True).read_only
