"""Whatever the cluster and the order of events: one plan, applied, leaves nothing to do, and a kill
in between changes nothing about where it ends."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvtier_operator.observe.store import CACHE_NODES, NODES, POLICIES

NAMES = st.sampled_from(["a", "b", "c"])
LABELS = st.sampled_from([{"gpu": "x"}, {"gpu": "y"}, {}])
SELECTORS = st.sampled_from(
    [
        {},
        {"matchLabels": {"gpu": "x"}},
        {"matchExpressions": [{"key": "gpu", "operator": "Exists"}]},
        {"matchExpressions": [{"key": "gpu", "operator": "NotIn", "values": ["x"]}]},
    ]
)
SPECS = st.fixed_dictionaries(
    {
        "nodeSelector": SELECTORS,
        "priority": st.integers(0, 2),
        # 100 is no multiple of 16: an invalid spec
        "page": st.sampled_from([{"tokens": 256}, {"tokens": 512}, {"tokens": 100}]),
        "rollout": st.sampled_from([{"paused": False}, {"paused": False}, {"paused": True}]),
    }
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("policy"), NAMES, SPECS),
        st.tuples(st.just("drop-policy"), NAMES, st.none()),
        st.tuples(st.just("node"), NAMES, LABELS),
        st.tuples(st.just("drop-node"), NAMES, st.none()),
        st.tuples(st.just("report"), NAMES, st.none()),
        st.tuples(st.just("hands-off"), NAMES, st.booleans()),
    ),
    max_size=14,
)
BOUNDED = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def act(api: Any, step: tuple[str, str, Any]) -> None:
    what, name, value = step
    if what == "policy":
        api.put_policy(name, **value)
    elif what == "node":
        api.put_node(name, **value)
    elif what == "drop-policy":
        api.remove(POLICIES, name)
    elif what == "drop-node":
        api.remove(NODES, name)
    elif what == "report" and (CACHE_NODES, name) in api.objects:
        api.report(name)
    elif what == "hands-off" and (POLICIES, name) in api.objects:
        api.annotate(name, {"kvtier.io/reconcile": "paused"} if value else {})


def everyone_reports(api: Any) -> None:
    for name in list(api.all_of(CACHE_NODES)):
        api.report(name)


def end_state(api: Any) -> dict[str, Any]:
    """Everything that matters: no versions, no times, no uids of what the operator made, and of
    revisions those that are in use."""
    out: dict[str, Any] = {}
    for name, raw in api.all_of(CACHE_NODES).items():
        spec = copy.deepcopy(raw["spec"])
        if "orphanedAt" in spec:
            spec["orphanedAt"] = "some time"
        out[f"node {name}"] = spec
    in_use = set()
    for name, raw in api.all_of(POLICIES).items():
        status = copy.deepcopy(raw["status"])
        for condition in status.get("conditions", ()):
            del condition["lastTransitionTime"]
        in_use |= {status.get("activeRevision"), status.get("desiredRevision")}
        out[f"policy {name}"] = status
    for name, raw in api.all_of("controllerrevisions").items():
        owner = raw["metadata"]["ownerReferences"][0]["name"]
        if any(r and name == f"{owner}-{r[:10]}" for r in in_use):
            out[f"revision {name}"] = raw["data"]
    return out


@given(steps=STEPS, seed=st.integers(0, 2**16))
@BOUNDED
def test_what_is_applied_needs_no_second_plan(
    new_api: Callable[[], Any], start: Any, steps: Any, seed: int
) -> None:
    async def scenario() -> None:
        api = new_api()
        process = start(on=api, seed=seed)
        for step in steps:
            act(api, step)
        await process.settle()
        everyone_reports(api)
        await process.settle()
        assert await process.plan_everything() == []
        api.writes.clear()
        fresh = start(on=api)  # a new process finds nothing to do either
        await fresh.settle()
        assert api.writes == []

    asyncio.run(scenario())


@given(steps=STEPS, seed=st.integers(0, 2**16))
@BOUNDED
def test_the_order_of_events_does_not_change_where_it_ends(
    new_api: Callable[[], Any], start: Any, steps: Any, seed: int
) -> None:
    async def scenario() -> None:
        api = new_api()
        for step in steps:
            act(api, step)
        twin = copy.deepcopy(api)
        process = start(on=api)
        process.list_all()  # a list again, events of the past again
        process.seen_events = 0
        await process.settle()
        other = start(on=twin, seed=seed)
        other.seen_events = 0
        await other.settle(shuffled=True)
        everyone_reports(api)
        everyone_reports(twin)
        await process.settle()
        await other.settle(shuffled=True)
        assert end_state(api) == end_state(twin)

    asyncio.run(scenario())


@given(steps=STEPS, kills=st.lists(st.integers(0, 6), max_size=14), seed=st.integers(0, 2**16))
@BOUNDED
def test_a_kill_between_any_two_writes_changes_nothing(
    new_api: Callable[[], Any], start: Any, steps: Any, kills: Any, seed: int
) -> None:
    """Both runs see each step on its own; one of them is killed after a few keys each time."""

    async def scenario() -> None:
        calm, rough = new_api(), new_api()
        process = start(on=calm)
        for step in steps:
            act(calm, step)
            await process.settle(2.0)
        victim = start(on=rough, seed=seed)
        for i, step in enumerate(steps):
            act(rough, step)
            for _ in range(kills[i] if i < len(kills) else 0):
                victim.deliver(shuffled=True)
                await victim.step()
            victim = start(on=rough, seed=seed + i)
            await victim.settle(2.0)
        everyone_reports(calm)
        everyone_reports(rough)
        await process.settle()
        await victim.settle()
        a, b = end_state(calm), end_state(rough)
        # uids are numbered in the order of making, which a kill may change.
        assert _without_uids(a) == _without_uids(b)

    asyncio.run(scenario())


def _without_uids(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_uids(v) for k, v in value.items() if k not in ("uid", "nodeUID")}
    if isinstance(value, list):
        return [_without_uids(v) for v in value]
    return value
