"""``kvtier operator``: its help, its settings, a user's mistakes, and what it never imports."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from command_run import PROGRAM
from kvtier_cli.operator import app
from kvtier_operator.settings import OperatorSettings
from pydantic import ValidationError
from typer.testing import CliRunner


def test_help_has_every_knob_with_unit_default_and_bounds() -> None:
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "240"}).output
    for name, field in OperatorSettings.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert field.description
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        if field.annotation in (int, float):
            assert extra.get("unit"), f"{name} has no unit"
            assert any(hasattr(m, "ge") or hasattr(m, "gt") for m in field.metadata), name
            assert any(hasattr(m, "le") for m in field.metadata), name
    assert "KVTIER_OPERATOR_NAMESPACE" in text.replace("\n", "")


@pytest.mark.parametrize("bad", ["8080", ":8080", "host:", "host:99999", "host:http"])
def test_an_address_is_host_and_port(bad: str) -> None:
    with pytest.raises(ValidationError, match="HOST:PORT"):
        OperatorSettings(http=bad)
    assert OperatorSettings(http="[::1]:0").http_address == ("::1", 0)


def kvtier(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROGRAM, "operator", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "sentence", "status"),
    [
        (["--kubeconfig", "/nowhere/config"], "/nowhere/config: No such file or directory", 1),
        (["--kubeconfig", __file__], "cannot use the kubeconfig", 1),
        ([], "give --kubeconfig FILE", 1),
        (["--write-concurrency", "0"], "--write-concurrency: write at least 1", 2),
        (["--http", "8080"], "write HOST:PORT", 2),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], sentence: str, status: int) -> None:
    answer = kvtier(*arguments)
    assert answer.returncode == status
    assert sentence in answer.stderr
    assert "Traceback" not in answer.stderr
    said = [line for line in answer.stderr.splitlines() if not line.startswith("{")]
    assert len(said) == 1


def test_a_taken_port_is_said_in_one_line(tmp_path: Path) -> None:
    kubeconfig = tmp_path / "config"
    kubeconfig.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\n"
        "clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]\n"
        "contexts: [{name: c, context: {cluster: c, user: u}}]\nusers: [{name: u, user: {}}]\n"
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        answer = kvtier("--kubeconfig", str(kubeconfig), "--http", f"127.0.0.1:{port}")
    assert answer.returncode == 1
    assert "give another --http HOST:PORT" in answer.stderr
    assert "Traceback" not in answer.stderr


def modules_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return set(answer.stdout.split())


def test_it_runs_without_torch_and_numpy() -> None:
    loaded = modules_after("import kvtier_operator.main")
    assert {"kopf", "kubernetes"} <= loaded
    assert not {"torch", "numpy", "zmq", "kvtier_agent"} & loaded


def test_help_needs_neither_kopf_nor_kubernetes() -> None:
    assert not {"kopf", "kubernetes", "torch"} & modules_after("import kvtier_cli.operator")
