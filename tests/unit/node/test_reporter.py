"""What the reporter makes of the object that it writes to."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
from kvtier_agent.node.report import Reporter
from kvtier_agent.node.watch import Sighting

BODY: dict[str, Any] = {"metadata": {"name": "a", "resourceVersion": "1"}, "spec": {}}


class Api:
    async def apply_status(
        self, name: str, status: Mapping[str, Any], resource_version: str | None
    ) -> dict[str, Any]:
        return {**BODY, "status": dict(status)}


def reporter(boot_id: str = "mine") -> Reporter:
    return Reporter(Api(), "a", lambda present: {"bootID": boot_id}, lambda: 10.0)  # type: ignore[arg-type]


def seen(boot_id: str) -> Sighting:
    return Sighting({**copy.deepcopy(BODY), "status": {"bootID": boot_id}}, "2")


async def test_another_agent_under_the_same_name_is_noticed() -> None:
    reports = reporter()
    reports.saw(seen("an earlier process"))
    await reports.turn(0.0)
    assert reports.writes == 1
    reports.saw(seen("mine"))
    assert reports.rival == ""
    reports.saw(seen("another"))
    assert reports.rival == "another"


@pytest.mark.parametrize("junk", [None, "text", [1]])
async def test_a_status_that_is_none_is_overwritten(junk: Any) -> None:
    reports = reporter()
    reports.saw(Sighting({**BODY, "status": junk}, "1"))
    await reports.turn(0.0)
    assert reports.writes == 1
