"""The example runs as its README says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TRACES = HERE.parents[2] / "shared" / "data" / "traces"


def commands() -> list[str]:
    """The command lines in the README's code blocks."""
    blocks = re.findall(r"```sh\n(.*?)```", (HERE / "README.md").read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def run(line: str, folder: Path, timeout: float = 110) -> subprocess.CompletedProcess[str]:
    words = line.split()
    if words[0] == "kvtier":
        words[:1] = [sys.executable, "-m", "kvtier_cli.main"]
    elif words[0] == "python":
        words[0] = sys.executable
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=timeout)


def test_the_readme_runs(tmp_path: Path) -> None:
    shutil.copy(HERE / "policy.yaml", tmp_path)
    for line in commands():
        done = run(line, tmp_path)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
    result = json.loads((tmp_path / "out.json").read_text())
    hits = result["hits"]
    assert result["trace"]["requests"] == 500
    assert result["pages_verified"] == hits["l0"] + hits["l1"] + hits["l2"] > 0
    assert result["wrong_bytes"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "policy", "blocks"),
    [
        ("mooncake_conversation", "policy.yaml", 288_500),
        ("claude_code_sessions_512", "agents.yaml", 3_309_281),
    ],
)
def test_each_tier_does_its_part_on_a_published_trace(
    name: str, policy: str, blocks: int, tmp_path: Path
) -> None:
    trace = TRACES / f"{name}.jsonl.gz"
    if not trace.exists():
        pytest.skip(f"{trace.name} is not on this machine")
    done = run(
        f"kvtier replay {trace} --policy {HERE / policy} --page-bytes 16384 --speed max"
        " --json out.json",
        tmp_path,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    hits = result["hits"]
    assert result["trace"]["blocks"] == blocks
    assert min(hits["l0"], hits["l1"], hits["l2"]) >= blocks / 100, hits
    assert result["pages_verified"] == hits["l0"] + hits["l1"] + hits["l2"]
    assert result["wrong_bytes"] == 0
