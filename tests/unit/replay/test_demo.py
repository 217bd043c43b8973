"""What the demo promises is judged by what was measured, and its router keeps sessions together."""

from __future__ import annotations

from typing import Any

import pytest
from demo.promises import Edit, judge
from demo.traffic import Figures, Held, route
from kvtier_agent.replay.sessions import SessionSettings, SessionTraffic


def edit(**changes: Any) -> Edit:
    held = {"node-a": Held(frozenset([b"1", b"2"]))}
    fields: dict[str, Any] = {
        "seconds": (1.0, 0.5),
        "before": held,
        "after": held,
        "boots_before": {"node-a": "x"},
        "boots_after": {"node-a": "x"},
    }
    return Edit(**fields | changes)


def figures(**changes: Any) -> dict[str, Figures]:
    fields: dict[str, Any] = {"requests": 9, "l0": 5, "l1": 3, "l2": 1, "miss": 4}
    return {"node-a": Figures(**fields | changes)}


def broken(of: dict[str, Figures], how: Edit) -> list[str]:
    return [promise.what for promise in judge(of, how) if not promise.holds]


def test_a_good_run_keeps_all_promises() -> None:
    assert broken(figures(), edit()) == []


@pytest.mark.parametrize(
    ("of", "how", "what"),
    [
        (figures(wrong_bytes=1), edit(), "wrong byte"),
        (figures(failed=1), edit(), "request fails"),
        (figures(l2=0), edit(), "every tier"),
        (figures(), edit(seconds=(1.0, 5.1)), "within 5 s"),
        (figures(), edit(after={"node-a": Held(frozenset([b"1"]))}), "drops no page"),
        (figures(), edit(before={"node-a": Held()}, after={"node-a": Held()}), "drops no page"),
        (figures(), edit(boots_after={"node-a": "y"}), "restarts nobody"),
        (figures(requests=0), edit(), "request fails"),
    ],
)
def test_each_promise_can_be_broken(of: dict[str, Figures], how: Edit, what: str) -> None:
    found = broken(of, how)
    assert len(found) == 1
    assert what in found[0]


def test_the_router_keeps_sessions_together_and_nodes_busy() -> None:
    settings = SessionSettings(seed=2, sessions_per_second=1)
    requests = list(SessionTraffic(settings).requests(count=1500))
    shares = route(requests, 3)
    assert sum(map(len, shares)) == len(requests)
    work = [sum(len(r.hash_ids) for r in share) for share in shares]
    assert min(work) > 0.7 * max(work)
    homes: dict[str, set[int]] = {}
    for number, share in enumerate(shares):
        for request in share:
            homes.setdefault(request.session_id, set()).add(number)
    moved = [session for session, nodes in homes.items() if len(nodes) > 1]
    assert len(moved) < len(homes) / 4
