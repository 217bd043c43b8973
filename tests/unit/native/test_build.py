"""How the extension is built: once for what it is made from, and never as a condition."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import native


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copy = tmp_path / "native"
    shutil.copytree(native.SOURCE, copy, ignore=shutil.ignore_patterns("target", "*.whl"))
    monkeypatch.setattr(native, "SOURCE", copy)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return copy


def test_the_fingerprint_covers_sources_lock_and_compiler(sources: Path) -> None:
    seen = {native.fingerprint("rustc 1"), native.fingerprint("rustc 2")}
    for changed in ("src/lib.rs", "src/ring/worker.rs", "Cargo.lock", "pyproject.toml"):
        with (sources / changed).open("a") as file:
            file.write("\n")
        seen.add(native.fingerprint("rustc 1"))
    assert len(seen) == 6
    (sources / "wheels" / "README.md").write_text("something else")
    assert native.fingerprint("rustc 1") in seen


def no_cargo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.shutil, "which", lambda _: None)


def switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_NATIVE", "0")


@pytest.mark.parametrize(
    ("cause", "says"), [(no_cargo, "no cargo on PATH"), (switched_off, "KVTIER_NATIVE=0")]
)
def test_what_stands_in_the_way_is_one_line_and_no_error(
    sources: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cause: Any,
    says: str,
) -> None:
    monkeypatch.setenv("KVTIER_NATIVE", "1")
    cause(monkeypatch)
    assert native.main(["install", "uv"]) == 0
    said = capsys.readouterr().err
    assert says in said
    assert "works without the native extension" in said
    assert said.count("\n") == 1


def test_a_build_that_fails_leaves_nothing_but_its_log(
    sources: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if shutil.which("cargo") is None:
        pytest.skip("there is no cargo on PATH")
    monkeypatch.setenv("KVTIER_NATIVE", "1")
    (sources / "Cargo.toml").write_text("this is no manifest")
    assert native.main(["install", "uv"]) == 0
    assert "the build failed" in capsys.readouterr().err
    cache = tmp_path / "cache" / "kvtier" / "native"
    assert {path.name for path in cache.iterdir()} == {".lock", "build.log"}
    assert "manifest" in (cache / "build.log").read_text()
