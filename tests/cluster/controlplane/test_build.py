"""A tool is taken from where it is, or built once; what stands in the way is said in a line."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from controlplane import ToolError, build, tool_path
from controlplane.__main__ import main
from controlplane.catalog import TOOLS, Tool

WriteProgram = Callable[[Path, str], Path]

REPOSITORY = Path(__file__).parents[3]

# What the compiler is asked for ends up in the file that stands for the binary.
FAKE_GO = """
echo started >> "$RECORD"
while [ $# -gt 1 ]; do [ "$1" = -o ] && out="$2"; shift; done
sleep "${SLOW:-0}"
said="GOFLAGS=$GOFLAGS GOOS=$GOOS CGO=$CGO_ENABLED WORK=$GOWORK"
{ echo "#!/bin/sh"; echo "echo $said"; } > "$out"
chmod +x "$out"
"""


@pytest.fixture
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache and a PATH that has the system's programs, but no Kubernetes and no Go."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "sleep", "chmod", "env"):
        (programs / name).symlink_to(Path("/bin") / name)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    monkeypatch.setenv("RECORD", str(tmp_path / "record"))
    return programs


@pytest.fixture
def lines() -> list[str]:
    return []


def builds(tmp_path: Path) -> int:
    record = tmp_path / "record"
    return len(record.read_text().splitlines()) if record.exists() else 0


def test_without_go_it_says_what_to_install(bare_machine: Path, lines: list[str]) -> None:
    with pytest.raises(ToolError) as missing:
        tool_path("etcd", log=lines.append)
    assert str(missing.value).startswith("etcd has to be built, and Go is missing: install Go 1.26")
    assert "\n" not in str(missing.value)


def test_the_command_reports_it_without_a_traceback(
    bare_machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["path", "etcd"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("controlplane: etcd has to be built, and Go is missing")


def test_an_unknown_tool_is_answered_with_the_known_ones(lines: list[str]) -> None:
    with pytest.raises(ToolError, match=r"no tool 'kubelet'; there are: etcd, helm, kube-apis"):
        tool_path("kubelet", log=lines.append)


def test_a_built_tool_is_kept(
    bare_machine: Path, tmp_path: Path, lines: list[str], write_program: WriteProgram
) -> None:
    write_program(bare_machine / "go", FAKE_GO)
    path = tool_path("etcd", log=lines.append)
    assert path.parent.parent == tmp_path / "cache" / "kvtier" / "tools"
    assert path.parent.name.startswith(f"etcd-{TOOLS['etcd'].version}-")
    assert "building (once; the result is kept in" in lines[0]
    assert "built in" in lines[1]

    assert tool_path("etcd", log=lines.append) == path
    assert builds(tmp_path) == 1
    assert len(lines) == 2


def test_the_callers_go_settings_do_not_change_what_is_built(
    bare_machine: Path,
    lines: list[str],
    write_program: WriteProgram,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {
        "GOFLAGS": "-mod=vendor -race",
        "GOOS": "plan9",
        "CGO_ENABLED": "1",
        "GOWORK": "/nowhere/go.work",
        "GOTOOLCHAIN": "go1.20",
    }.items():
        monkeypatch.setenv(name, value)
    write_program(bare_machine / "go", FAKE_GO)
    path = tool_path("etcd", log=lines.append)
    said = subprocess.run([path], capture_output=True, text=True, check=True).stdout
    assert said == "GOFLAGS=-buildvcs=false GOOS= CGO=0 WORK=off\n"


def test_two_callers_build_once(
    bare_machine: Path,
    tmp_path: Path,
    lines: list[str],
    write_program: WriteProgram,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLOW", "0.5")
    write_program(bare_machine / "go", FAKE_GO)
    other = subprocess.Popen(
        [sys.executable, "-m", "controlplane", "path", "etcd"],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY / "tools")},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    mine: list[Path] = []
    callers = [
        threading.Thread(target=lambda: mine.append(tool_path("etcd", log=lines.append)))
        for _ in range(2)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    theirs, _ = other.communicate(timeout=30)
    assert {str(path) for path in mine} == {theirs.strip()}
    assert len(mine) == 2
    assert builds(tmp_path) == 1


def test_a_long_build_says_that_it_is_alive(
    bare_machine: Path,
    lines: list[str],
    write_program: WriteProgram,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "PROGRESS_SECONDS", 0.1)
    monkeypatch.setenv("SLOW", "0.5")
    write_program(bare_machine / "go", FAKE_GO)
    tool_path("helm", log=lines.append)
    assert any(line.startswith("helm v4") and "building, 0 s" in line for line in lines)


def test_a_failed_build_shows_the_compilers_words_and_leaves_nothing(
    bare_machine: Path, tmp_path: Path, lines: list[str], write_program: WriteProgram
) -> None:
    write_program(
        bare_machine / "go",
        "echo 'go: downloading example.org/x v1.0.0' >&2; echo 'main.go:1: no' >&2; exit 1",
    )
    with pytest.raises(ToolError) as failed:
        tool_path("promtool", log=lines.append)
    version = TOOLS["promtool"].version
    assert str(failed.value) == f"promtool {version} could not be built: main.go:1: no"
    kept = [path.name for path in (tmp_path / "cache/kvtier/tools").iterdir()]
    assert all(name.endswith(".lock") for name in kept)


@pytest.mark.parametrize("place", ["KUBEBUILDER_ASSETS", "PATH"])
def test_a_given_program_of_the_right_version_is_used(
    bare_machine: Path,
    tmp_path: Path,
    lines: list[str],
    write_program: WriteProgram,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    folder = bare_machine
    if place == "KUBEBUILDER_ASSETS":
        folder = tmp_path / "assets"
        monkeypatch.setenv("KUBEBUILDER_ASSETS", str(folder))
    major, minor, _ = TOOLS["kube-apiserver"].program_version.split(".")
    given = write_program(folder / "kube-apiserver", f"echo Kubernetes v{major}.{minor}.99")
    assert tool_path("kube-apiserver", log=lines.append) == given
    assert lines == [f"kube-apiserver: using {given} (from {place})"]


def test_a_given_program_of_another_version_is_named_and_left_alone(
    bare_machine: Path, lines: list[str], write_program: WriteProgram
) -> None:
    old = write_program(bare_machine / "kube-apiserver", "echo Kubernetes v1.20.4")
    write_program(bare_machine / "go", FAKE_GO)
    assert tool_path("kube-apiserver", log=lines.append) != old
    wanted = ".".join(TOOLS["kube-apiserver"].program_version.split(".")[:2])
    assert lines[0] == (
        f"kube-apiserver: not using {old} from PATH: {wanted} is wanted, "
        "it says 'Kubernetes v1.20.4'"
    )


def test_kubectl_may_be_one_minor_version_off(
    bare_machine: Path, lines: list[str], write_program: WriteProgram
) -> None:
    server = int(TOOLS["kube-apiserver"].program_version.split(".")[1])
    kubectl = bare_machine / "kubectl"

    def report(minor: int) -> str:
        return f"""echo '{{"clientVersion": {{"gitVersion": "v1.{minor}.0"}}}}'"""

    for minor in (server - 1, server, server + 1):
        write_program(kubectl, report(minor))
        assert tool_path("kubectl", log=lines.append) == kubectl
    assert lines == []
    # The one that came with the Python environment stands in for one that is too old.
    write_program(kubectl, report(server - 2))
    assert tool_path("kubectl", log=lines.append) != kubectl
    assert lines == [
        f"kubectl: not using {kubectl} from PATH: 1.{server} is wanted, give or take one"
    ]


def test_every_module_is_pinned_and_reports_its_version() -> None:
    versions = {name: tool.program_version for name, tool in TOOLS.items() if tool.module}
    assert versions["kube-apiserver"].startswith("1.36.")
    assert (
        versions["kube-apiserver"]
        == versions["kube-controller-manager"]
        == versions["kube-scheduler"]
    )
    assert versions["helm"].startswith("4.")
    # Prometheus 3.x is published as module v0.3xx.
    assert versions["promtool"].startswith("3.")
    for tool in TOOLS.values():
        assert (tool.folder / "go.mod").exists()
        assert (tool.folder / "go.sum").exists() == bool(tool.module)
        assert tool.accepts(f"version v{tool.program_version}") == bool(tool.module)


def test_the_cache_key_follows_what_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.catalog.MODULES", tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "go.mod").write_text("module own\n")
    before = Tool("own", package=".").fingerprint()
    (tmp_path / "own" / "README").write_text("not compiled")
    assert Tool("own", package=".").fingerprint() == before
    assert Tool("own", package="./cmd").fingerprint() != before
    (tmp_path / "own" / "go.sum").write_text("x")
    assert Tool("own", package=".").fingerprint() != before


def test_a_relative_cache_folder_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    home = Path.home() / ".cache" / "kvtier" / "tools"
    assert build.cache_root({"XDG_CACHE_HOME": "here"}) == home
    assert build.cache_root({}) == home
    assert build.cache_root({"XDG_CACHE_HOME": "/there"}) == Path("/there/kvtier/tools")
