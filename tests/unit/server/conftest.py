"""Agents to talk to: in this process, or in one of their own."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_agent
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.server.client import Client
from small_agent import SmallAgent, sweep

PAGE_TOKENS = 16
GEOMETRY = Geometry.of_page_bytes(16384, PAGE_TOKENS)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: Unix sockets take 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="kvt-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)
    sweep(path)


@pytest.fixture
def make_agent(folder: Path) -> Iterator[Callable[..., Any]]:
    """Builds agents in this process; see ``SmallAgent`` for what can be said."""
    made: list[Any] = []

    def make(**settings: Any) -> Any:
        made.append(SmallAgent(folder, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def agent(make_agent: Callable[..., Any]) -> Any:
    return make_agent()


@dataclass
class AgentProcess:
    """An agent in a process of its own."""

    folder: Path
    process: subprocess.Popen[str]
    port: int

    def socket(self, domain: str = "default") -> Path:
        return self.folder / "run" / f"{domain}.sock"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)


@pytest.fixture
def start_agent(folder: Path) -> Iterator[Callable[..., AgentProcess]]:
    """Starts agent processes; all on the same folder, so start the next after the last ended."""
    started: list[AgentProcess] = []

    def start(**settings: Any) -> AgentProcess:
        process = subprocess.Popen(
            [
                sys.executable,
                small_agent.__file__,
                json.dumps({"folder": str(folder), **settings}),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        started.append(AgentProcess(folder, process, ready["port"]))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.kill()


@pytest.fixture
def connect() -> Iterator[Callable[..., Client]]:
    """Clients that are closed at the end. Patient ones: other work may share this machine."""
    made: list[Client] = []

    def make(socket: Path, geometry: Geometry = GEOMETRY, **settings: Any) -> Client:
        made.append(Client(socket, geometry, **{"timeout_seconds": 15.0, **settings}))
        return made[-1]

    yield make
    for one in made:
        one.close()


@dataclass
class Pages:
    """Keys of a chain and pages whose bytes nobody else has."""

    keys: np.ndarray
    bytes: np.ndarray

    def __len__(self) -> int:
        return len(self.keys)

    def only(self, i: int) -> Pages:
        """One of them."""
        return Pages(self.keys[i : i + 1], self.bytes[i : i + 1])


@pytest.fixture
def pages_of() -> Callable[..., Pages]:
    def make(seed: int, n: int, page_bytes: int = GEOMETRY.page_bytes) -> Pages:
        rng = np.random.default_rng(seed)
        return Pages(
            rng.integers(0, 256, (n, 16), dtype=np.uint8),
            rng.integers(0, 256, (n, page_bytes), dtype=np.uint8),
        )

    return make


@pytest.fixture
def until() -> Callable[..., bool]:
    def wait(condition: Callable[[], Any], seconds: float = 10.0) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if condition():
                return True
            time.sleep(0.01)
        return bool(condition())

    return wait


@pytest.fixture
def get() -> Callable[[int, str], tuple[int, str]]:
    """HTTP status and body of an agent's path."""

    def fetch(port: int, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    return fetch
