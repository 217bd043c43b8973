"""What is in the way of a watch is said once, in words that say what to do, and counted."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from kvtier_operator.observe.freshness import Freshness
from kvtier_operator.observe.store import KINDS
from kvtier_operator.runtime import tap
from kvtier_operator.runtime.obstacles import (
    MAX_SECONDS,
    REPEAT_SECONDS,
    Obstacle,
    Obstacles,
    obstacle_of,
)


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


class Log:
    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, event: str, **fields: Any) -> None:
        self.lines.append((event, fields))


@pytest.mark.parametrize(
    ("code", "message", "sentence", "refused"),
    [
        (401, "Unauthorized", "refuses the operator's token", True),
        (
            403,
            'User "u" cannot watch',
            'right to watch nodes is missing (403 Forbidden): User "u"',
            1,
        ),
        (429, "too many", "HTTP 429): too many", False),
        (503, "", "cannot answer at present (HTTP 503)", False),
    ],
)
def test_what_waiting_can_change(code: int, message: str, sentence: str, refused: bool) -> None:
    found = obstacle_of("watch nodes", code, {"message": message})
    assert found is not None
    assert sentence in found.sentence
    assert found.refused == bool(refused)


@pytest.mark.parametrize("code", [400, 404, 410])
def test_what_waiting_does_not_change(code: int) -> None:
    assert obstacle_of("watch nodes", code, {}) is None


@pytest.mark.parametrize(
    ("headers", "body", "seconds"),
    [
        ({"Retry-After": "7"}, {}, 7.0),
        ({}, {"details": {"retryAfterSeconds": 3}}, 3.0),
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, {}, 0.0),
        ({"Retry-After": "86400"}, {}, 60.0),
        ({}, {"details": None}, 0.0),
    ],
)
def test_the_server_may_ask_for_time(
    headers: Mapping[str, str], body: Mapping[str, Any], seconds: float
) -> None:
    found = obstacle_of("watch nodes", 429, body, headers)
    assert found is not None
    assert found.retry_after == seconds


def test_three_watches_with_one_obstacle_are_one_line_and_then_a_number() -> None:
    clock, said, told = Clock(), Log(), Log()
    obstacles = Obstacles(clock, said, told)
    refused = Obstacle("the token is refused", refused=True)
    for _ in range(40):
        for kind in KINDS:
            obstacles.met(f"watch {kind}", refused)
        clock.now += 1
    assert said.lines == [("waiting", {"obstacle": "the token is refused"})]
    assert obstacles.refused == ("the token is refused",)
    clock.now += REPEAT_SECONDS
    obstacles.met("watch nodes", refused)
    assert said.lines[1:] == [("waiting", {"obstacle": "the token is refused", "times": 120})]
    for kind in KINDS:
        obstacles.granted(f"watch {kind}")
    assert obstacles.refused == ()
    assert len(told.lines) == 1
    obstacles.granted("watch nodes")
    assert len(told.lines) == 1
    obstacles.met("watch nodes", refused)  # a new time is news
    assert len(said.lines) == 3


def test_waits_grow_to_a_bound_and_start_small_again() -> None:
    obstacles = Obstacles(Clock(), Log(), Log())
    away = Obstacle("away")
    waits = [obstacles.met("list nodes", away) for _ in range(20)]
    assert waits[:4] == [0.5, 1.0, 2.0, 4.0]
    assert max(waits) == MAX_SECONDS
    assert obstacles.met("list nodes", Obstacle("busy", retry_after=30.0)) == 30.0
    obstacles.granted("list nodes")
    assert obstacles.met("list nodes", away) == 0.5


class Answer:
    """As much of an aiohttp response as the session looks at."""

    def __init__(self, status: int, text: str = "{}", headers: Any = None) -> None:
        self.status = status
        self.reason = "why"
        self.headers = headers or {}
        self._text = text

    async def text(self, **_: Any) -> str:
        return self._text

    async def json(self) -> Any:
        return {"items": [], "metadata": {"resourceVersion": "5"}}


class Wire:
    """Answers in turn."""

    closed = False

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    async def request(self, *_: Any, **__: Any) -> Answer:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, Answer)
        return answer


class Api:
    async def update_params_for_auth(self, *_: Any) -> None:
        return None


def session(wire: Wire, obstacles: Obstacles, heard: list[str]) -> tap.TappedSession:
    tapped = tap.TappedSession.__new__(tap.TappedSession)
    tapped._api = Api()  # type: ignore[assignment]
    tapped._freshness = Freshness(KINDS, Clock())
    tapped._obstacles = obstacles
    tapped._on_list = lambda kind, objects, version: heard.append(f"{kind}@{version}")
    tapped._partial = {}
    tapped._session = wire  # type: ignore[assignment]
    return tapped


async def test_kopf_hears_nothing_of_what_passes(monkeypatch: Any) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(tap.asyncio, "sleep", sleep)
    said, told, heard = Log(), Log(), []
    obstacles = Obstacles(Clock(), said, told)
    wire = Wire(
        tap.aiohttp.ServerDisconnectedError(),
        TimeoutError(),
        Answer(503, "upstream is away"),
        Answer(401, '{"kind": "Status", "message": "Unauthorized"}'),
        Answer(403, '{"kind": "Status", "message": "no"}'),
        Answer(429, "{}", {"Retry-After": "9"}),
        Answer(200),
    )
    tapped = session(wire, obstacles, heard)
    answer = await tapped.request("GET", "https://k/api/v1/nodes?limit=500")
    assert answer.status == 200
    assert heard == ["nodes@5"]
    assert slept == [0.5, 1.0, 2.0, 4.0, 5.0, 9.0]
    text = " | ".join(fields["obstacle"] for _, fields in said.lines)
    for part in ("Server disconnected", "TimeoutError", "503): upstream", "(401", "list nodes is"):
        assert part in text
    assert len(told.lines) == 1


async def test_kopf_hears_what_does_not_pass() -> None:
    obstacles = Obstacles(Clock(), Log(), Log())
    tapped = session(Wire(Answer(404, "404 page not found\n")), obstacles, [])
    url = "https://k/apis/kvtier.io/v1alpha1/kvtierpolicies?watch=true"
    assert (await tapped.request("GET", url)).status == 404
    assert obstacles.final == (
        "the API server answers HTTP 404 to watch kvtierpolicies: 404 page not found; was the CRD"
        " removed?"
    )


async def test_a_closed_session_is_not_taken_for_a_server_that_is_away() -> None:
    obstacles = Obstacles(Clock(), Log(), Log())
    wire = Wire(tap.aiohttp.ClientConnectionError("Connector is closed."))
    wire.closed = True
    with pytest.raises(tap.aiohttp.ClientConnectionError):
        await asyncio.wait_for(
            session(wire, obstacles, []).request("GET", "https://k/api/v1/nodes"), 30
        )
