"""`kvtier bench` as a command, with figures nobody looks at: the runs are as small as can be."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import command_run
import pytest
from command_run import Done


@pytest.fixture(scope="session")
def bench() -> Callable[..., Done]:
    """Runs `kvtier bench` with these arguments to its end; `path`: PATH of the run."""

    def run(*arguments: object, path: Path | None = None) -> Done:
        environment = dict(os.environ) | ({} if path is None else {"PATH": str(path)})
        return command_run.run("bench", *arguments, timeout=100, environment=environment)

    return run
