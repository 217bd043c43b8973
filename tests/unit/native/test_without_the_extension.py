"""Everything works without the extension: `KVTIER_NATIVE=0 make test` is the whole of it, this the
part that stands nearest to it, so that no release rests on somebody's remembering that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TESTS = ("tests/unit/cache", "tests/unit/storage", "tests/unit/server/test_round_trip.py")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_cache_storage_and_a_round_trip_pass_without_it() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment["KVTIER_NATIVE"] = "0"
    said = subprocess.run(
        [sys.executable, "-c", "from kvtier_agent import native; print(native.described())"],
        env=environment, cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert said.stdout == "none (KVTIER_NATIVE=0)\n"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-m", "not slow", *TESTS),
        ],
        env=environment, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
