"""What the replay's tests share: generated traces and the command as a subprocess."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kvtier_agent.replay.sessions import SessionSettings, SessionTraffic
from kvtier_agent.replay.trace import write_trace

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
def sessions_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 requests of agent and chat sessions, about 26,000 blocks."""
    path = tmp_path_factory.mktemp("traces") / "sessions.jsonl.gz"
    settings = SessionSettings(seed=3, sessions_per_second=0.3)
    write_trace(path, SessionTraffic(settings).requests(count=600))
    return path


@pytest.fixture(scope="session")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Done]:
    """Runs `kvtier replay` with these arguments to its end."""

    def run(*arguments: object) -> Done:
        done = subprocess.run(
            [*KVTIER, "replay", *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=tmp_path_factory.mktemp("replay"),
            timeout=100,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run
