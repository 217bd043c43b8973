"""A command of `kvtier` run to its end as a subprocess, for tests."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KVTIER = (sys.executable, "-m", "kvtier_cli.main")
PROGRAM = Path(sys.executable).parent / "kvtier"
"""The command as it is installed."""


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """What it wrote to standard output, one JSON object."""
        found: dict[str, Any] = json.loads(self.out)
        return found


def run(
    *arguments: object,
    timeout: float,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Done:
    """`kvtier ARGUMENTS`; `timeout` in seconds, `environment` and `folder` instead of this
    process's."""
    done = subprocess.run(
        [*KVTIER, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=None if environment is None else dict(environment),
        cwd=folder,
        timeout=timeout,
    )
    return Done(done.returncode, done.stdout, done.stderr)
