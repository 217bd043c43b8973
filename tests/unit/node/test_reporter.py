"""What the reporter makes of the object that it writes to."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from kvtier_agent.node.report import Reporter
from kvtier_agent.node.rival import Rival
from kvtier_agent.node.watch import Sighting

BODY: dict[str, Any] = {"metadata": {"name": "a", "resourceVersion": "1"}, "spec": {}}


class Api:
    async def apply_status(
        self, name: str, status: Mapping[str, Any], resource_version: str | None
    ) -> dict[str, Any]:
        return {**BODY, "status": dict(status)}


def reporter(boot_id: str = "mine", clock: Callable[[], float] = lambda: 0.0) -> Reporter:
    build = {"bootID": boot_id}
    return Reporter(Api(), "a", lambda _: build, lambda: 10.0, clock)  # type: ignore[arg-type]


def seen(boot_id: str) -> Sighting:
    return Sighting({**copy.deepcopy(BODY), "status": {"bootID": boot_id}}, "2")


async def test_another_agent_under_the_same_name_is_noticed_and_forgotten() -> None:
    now = [0.0]
    reports = reporter(clock=lambda: now[0])
    reports.saw(seen("an earlier process"))
    await reports.turn(now[0])
    assert reports.writes == 1
    for after, rival in ((0.0, ""), (10.0, "another"), (20.0, "another")):
        now[0] = after
        reports.saw(seen("mine"))
        reports.saw(seen("another"))
        reports.saw(seen("another"))
        assert reports.rival == rival
        await reports.turn(after + 11.0)
    for after, rival in ((30.0, "another"), (51.0, "")):
        now[0] = after
        reports.saw(seen("mine"))
        assert reports.rival == rival


def test_what_a_predecessor_had_under_way_is_no_rival() -> None:
    state = Rival().saw("", "before", 10.0, 0.0)
    assert state == Rival(), "nothing was written yet"
    state = state.wrote().saw("mine", "before", 10.0, 1.0)
    for now in (2.0, 12.0, 22.0, 32.0):
        assert state.present(10.0, now) == ""
        state = state.wrote().saw("mine", "mine", 10.0, now)
    late = state.wrote().saw("mine", "another", 10.0, 100.0)
    assert late.present(10.0, 100.0) == "", "what was seen long ago does not count"


@pytest.mark.parametrize("junk", [None, "text", [1]])
async def test_a_status_that_is_none_is_overwritten(junk: Any) -> None:
    reports = reporter()
    reports.saw(Sighting({**BODY, "status": junk}, "1"))
    await reports.turn(0.0)
    assert reports.writes == 1
