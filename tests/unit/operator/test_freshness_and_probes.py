"""Silence of a watch is seen, and time in which nothing could be seen does not count."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest
from kvtier_operator.metrics import CONTENT_TYPE, Metrics
from kvtier_operator.observe.freshness import GAP_SECONDS, HOLD_SECONDS, Freshness
from kvtier_operator.runtime.http import serve
from kvtier_operator.runtime.obstacles import Obstacle


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_ages_grow_with_silence() -> None:
    clock = Clock()
    fresh = Freshness(("a", "b"), clock)
    assert fresh.ages() == {"a": None, "b": None}
    fresh.connected("a")
    clock.now += 5
    fresh.heard("unknown")
    assert fresh.ages() == {"a": 5.0, "b": None}
    fresh.heard("a")
    assert fresh.ages()["a"] == 0.0


def test_seen_time_stands_still_while_blind() -> None:
    clock = Clock()
    fresh = Freshness(("a",), clock)
    fresh.connected("a")
    start = fresh.seen("a")
    clock.now += 10
    fresh.heard("a")
    assert fresh.seen("a") - start == 10.0
    clock.now += 60  # the connection is lost, and comes back after a minute
    assert fresh.seen("a") - start == 10.0
    fresh.connected("a")
    assert fresh.seen("a") - start == 10.0
    clock.now += 7
    fresh.heard("a")
    assert fresh.seen("a") - start == 17.0


def test_a_gap_on_a_living_watch_is_judged_only_after_a_while() -> None:
    """Storage that hangs: nobody can report, no watch ends, and agents come back one by one."""
    clock = Clock()
    fresh = Freshness(("a",), clock)
    fresh.connected("a")
    for _ in range(4):
        clock.now += 10
        fresh.heard("a")
    before = fresh.seen("a")
    assert (fresh.judged("a"), fresh.hold("a")) == (before, 0.0)
    clock.now += 45
    fresh.heard("a")  # the first agent is back
    assert fresh.seen("a") == before + 45
    assert (fresh.judged("a"), fresh.hold("a")) == (before, HOLD_SECONDS)
    clock.now += 4
    fresh.heard("a")
    assert (fresh.judged("a"), fresh.hold("a")) == (before + 4, HOLD_SECONDS - 4)
    clock.now += HOLD_SECONDS - 4
    assert (fresh.judged("a"), fresh.hold("a")) == (fresh.seen("a"), 0.0)


def test_signs_far_apart_do_not_put_off_judgement_for_ever() -> None:
    assert HOLD_SECONDS < GAP_SECONDS
    clock = Clock()
    fresh = Freshness(("a",), clock)
    fresh.connected("a")
    for _ in range(5):  # nothing but bookmarks: every agent is dead
        before = fresh.seen("a")
        clock.now += 60 - HOLD_SECONDS
        fresh.heard("a")
        assert fresh.judged("a") == before < fresh.seen("a")
        clock.now += HOLD_SECONDS
        assert fresh.judged("a") == fresh.seen("a")


async def get(port: int, path: str, method: str = "GET") -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), body


async def test_probes_answer_what_the_reports_say() -> None:
    well = {"health": True, "ready": False}
    metrics = Metrics()
    metrics.wrote("kvtiernodes", "patch", "ok")
    metrics.watch("kvtier_operator_test", "help", lambda: {"x": 2.5})
    server = await serve(
        "127.0.0.1",
        0,
        health=lambda: (well["health"], {"ok": well["health"]}),
        readiness=lambda: (well["ready"], {"ok": well["ready"], "why": "not listed yet"}),
        metrics=metrics.render,
        metrics_type=CONTENT_TYPE,
    )
    port = server.sockets[0].getsockname()[1]
    assert (await get(port, "/healthz"))[0] == 200
    code, body = await get(port, "/readyz?verbose")
    assert code == 503
    assert json.loads(body)["why"] == "not listed yet"
    assert (await get(port, "/readyz", "HEAD")) == (503, b"")
    code, body = await get(port, "/metrics")
    assert code == 200
    assert b'resource="kvtiernodes",verb="patch"' in body
    assert b'kvtier_operator_test{kind="x"} 2.5' in body
    assert (await get(port, "/else"))[0] == 404
    assert (await get(port, "/healthz", "POST"))[0] == 405
    server.close()


@pytest.mark.parametrize("junk", [b"\x00\x01\x02\r\n\r\n", b"GET\r\n\r\n", b"x" * 20000])
async def test_junk_on_the_probe_port_does_no_harm(junk: bytes) -> None:
    server = await serve(
        "127.0.0.1",
        0,
        health=lambda: (True, {}),
        readiness=lambda: (True, {}),
        metrics=lambda: b"",
        metrics_type="text/plain",
    )
    port = server.sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(junk)
    await writer.drain()
    with contextlib.suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), 10)
    writer.close()
    assert (await get(port, "/healthz"))[0] == 200
    server.close()


async def test_an_operator_is_live_while_it_waits_and_red_when_a_watch_is_silent(
    monkeypatch: Any,
) -> None:
    from kvtier_operator import main
    from kvtier_operator.settings import OperatorSettings

    clock = Clock()
    monkeypatch.setattr(main.time, "monotonic", clock)
    operator = main.Operator(OperatorSettings(), api=None)
    assert operator.health()[0] is True
    assert operator.readiness()[0] is False
    operator.watch()
    assert operator.health()[0] is True  # nothing was heard yet, but time enough is left
    clock.now += 601
    assert operator.health()[0] is False
    operator.watch()
    for kind in ("kvtierpolicies", "kvtiernodes", "nodes"):
        operator.freshness.connected(kind)
        operator.reconciler.on_list(kind, [], 1)
    assert operator.health()[0] is True
    assert operator.readiness()[0] is True
    operator.reconciler._forbidden.add(("policy", "p"))
    well, details = operator.readiness()
    assert (well, details["objectsThatMayNotBeWritten"]) == (False, 1)
    assert operator.health()[0] is True  # a restart would not help
    operator.reconciler._forbidden.clear()
    operator.obstacles.met("watch nodes", Obstacle("the token is refused", refused=True))
    well, details = operator.readiness()
    assert (well, details["watchesRefused"]) == (False, ("the token is refused",))
    assert operator.health()[0] is True
    operator.obstacles.granted("watch nodes")
    operator.obstacles.met("watch nodes", Obstacle("away for a moment"))
    assert operator.readiness()[0] is True
    clock.now += 200
    operator.freshness.heard("nodes")
    operator.freshness.heard("kvtiernodes")
    well, details = operator.readiness()
    assert not well
    assert details["secondsSinceWatchWasHeard"]["kvtierpolicies"] == 200.0
    assert operator.health()[0] is True
    clock.now += 500
    assert operator.health()[0] is False
