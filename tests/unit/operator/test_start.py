"""Before anything is watched: wait for the API server and the CRDs, and say what is missing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from kvtier_operator.apply.errors import Unreachable
from kvtier_operator.runtime import readiness

BOTH = json.dumps({"resources": [{"name": "kvtierpolicies"}, {"name": "kvtiernodes"}]})
ONE = json.dumps({"resources": [{"name": "kvtierpolicies"}]})


class Server:
    """Answers in turn; an exception is raised, the last answer stays."""

    def __init__(self, *rounds: dict[str, Any]) -> None:
        self.rounds = list(rounds)

    async def get_raw(self, path: str) -> tuple[int, str]:
        answer = self.rounds[0].get(path, (200, "ok"))
        if (path != "/readyz" or answer != (200, "ok")) and len(self.rounds) > 1:
            self.rounds.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize(
    ("obstacle", "sentence"),
    [
        ({"/readyz": Unreachable("refused")}, "cannot be reached: refused"),
        ({"/readyz": (500, "etcd failed")}, "not ready: HTTP 500"),
        ({"/readyz": (401, "")}, "refuses these credentials (HTTP 401"),
        ({readiness.DISCOVERY: (404, "")}, "CRDs of kvtier.io/v1alpha1 are not installed"),
        ({readiness.DISCOVERY: (200, ONE)}, "CRDs are missing: kvtiernodes"),
        ({readiness.DISCOVERY: (503, "")}, "does not list kvtier.io/v1alpha1: HTTP 503"),
    ],
)
async def test_each_obstacle_is_said_once_and_waited_for(
    obstacle: dict[str, Any], sentence: str, monkeypatch: Any
) -> None:
    said: list[str] = []
    monkeypatch.setattr(readiness.log, "warning", lambda _, obstacle: said.append(obstacle))
    sleeps: list[float] = []

    async def sleep(seconds: float) -> None:
        sleeps.append(seconds)

    monkeypatch.setattr(readiness.asyncio, "sleep", sleep)
    server = Server(obstacle, obstacle, obstacle, {readiness.DISCOVERY: (200, BOTH)})
    await asyncio.wait_for(readiness.wait_until_ready(server), 5)  # type: ignore[arg-type]
    assert len(said) == 1
    assert sentence in said[0]
    assert sleeps == [0.2, 0.4, 0.8]


async def test_a_ready_cluster_is_not_waited_for(monkeypatch: Any) -> None:
    async def sleep(seconds: float) -> None:
        raise AssertionError("waited")

    monkeypatch.setattr(readiness.asyncio, "sleep", sleep)
    server = Server({readiness.DISCOVERY: (200, BOTH)})
    await readiness.wait_until_ready(server)  # type: ignore[arg-type]
    assert await readiness._obstacle(server) == ""  # type: ignore[arg-type]
