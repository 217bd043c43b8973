"""Both images, built and run as the chart's Pods do, against a real API server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.usefixtures("helm")
def test_both_images_are_built_and_run() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "image", "test", "--tag", "test"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tools")},
    )
    print(done.stdout, done.stderr, sep="\n")
    assert done.returncode == 0, done.stderr
    sizes = {
        name: int(size) for name, size in re.findall(r"kvtier/(\w+):test\s+(\d+) MB", done.stdout)
    }
    assert set(sizes) == {"operator", "agent"}
    assert sizes["operator"] < 500, "the operator's image has grown; what came in?"
    assert "policy in force" in done.stdout
    assert "image-test: passed" in done.stdout
