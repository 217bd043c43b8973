"""`pip install kvtier[operator]` into a fresh environment: it runs, and there is no torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def uv() -> str:
    """`make setup` leaves one in .tools; another on PATH will do."""
    own = ROOT / ".tools" / "bin" / "uv"
    found = str(own) if own.exists() else shutil.which("uv")
    assert found, "no uv: run `make setup`"
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_operator_extra_brings_no_torch(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    python = str(venv / "bin" / "python")
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(*command: str) -> str:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(uv(), "venv", "--quiet", "--python", sys.executable, str(venv))
    run(
        uv(), "pip", "install", "--quiet", "--python", python, f"kvtier[operator] @ {ROOT.as_uri()}"
    )
    installed = {line.split("==")[0] for line in run(
        uv(), "pip", "freeze", "--python", python
    ).splitlines()}  # fmt: skip
    assert {"kopf", "kubernetes"} <= installed
    assert not installed & {"torch", "numpy", "pyzmq", "triton", "matplotlib"}
    assert not [name for name in installed if name.startswith("nvidia-")]
    run(python, "-c", "import kvtier_operator.main, kvtier_api; import sys; "
        "assert 'torch' not in sys.modules")  # fmt: skip
    assert "operator" in run(str(venv / "bin" / "kvtier"), "--help")
    assert "--namespace" in run(str(venv / "bin" / "kvtier"), "operator", "--help")
    refused = subprocess.run(
        [str(venv / "bin" / "kvtier"), "agent", "--policy", "x"],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert refused.returncode != 0
    assert "CHECKOUT[agent]" in refused.stderr
    assert "Traceback" not in refused.stderr
