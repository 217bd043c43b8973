"""`kvtier bench` as a command, with figures nobody looks at: the runs are as small as can be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

KVTIER = (sys.executable, "-m", "kvtier_cli.main")


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found


@pytest.fixture(scope="session")
def bench() -> Callable[..., Done]:
    """Runs `kvtier bench` with these arguments to its end; `path`: PATH of the run."""

    def run(*arguments: object, path: Path | None = None) -> Done:
        environment = dict(os.environ) | ({} if path is None else {"PATH": str(path)})
        done = subprocess.run(
            [*KVTIER, "bench", *map(str, arguments)],
            capture_output=True,
            text=True,
            env=environment,
            timeout=100,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run
