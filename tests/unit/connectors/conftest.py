"""The connector on stand-ins for vLLM, with a real agent behind it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The connector's module; vLLM is a stand-in."""
    pytest.importorskip("torch", reason="the connector needs torch")
    import fake_vllm

    return fake_vllm.install(monkeypatch)


@pytest.fixture
def agent() -> Iterator[Any]:
    from small_agent import SmallAgent, sweep

    folder = Path(tempfile.mkdtemp(prefix="kvt-"))  # sockets want short paths
    made = SmallAgent(folder)
    yield made
    made.close()
    shutil.rmtree(folder, ignore_errors=True)
    sweep(folder)


@pytest.fixture
def start(connector: Any, agent: Any) -> Iterator[Callable[..., Any]]:
    """Starts engines on the agent; `extra` as in `fake_vllm.vllm_config`."""
    import fake_vllm

    made: list[Any] = []

    def one(*, weights: str = "w", **extra: Any) -> Any:
        config = fake_vllm.vllm_config(socket=agent.socket(), **extra)
        made.append(fake_vllm.FakeEngine(connector, config, weights))
        return made[-1]

    yield one
    for engine in made:
        engine.close()
