"""What somebody else does to objects that the operator writes: repaired, tolerated, or answered
ever more slowly; never a reason to stop or to write without end."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import itertools
from typing import Any

import pytest
from kvtier_api.conditions import Condition, find
from kvtier_api.reasons import Reason
from kvtier_operator.apply.errors import Forbidden, Invalid
from kvtier_operator.decide.facts import StoredRevision
from kvtier_operator.decide.gather import Knobs, NodeInputs, PolicyInputs, RuledNode
from kvtier_operator.decide.plan import ApplyNode, EmitEvent
from kvtier_operator.decide.policy import plan_policy, status_of
from kvtier_operator.decide.rules.nodes import plan_node
from kvtier_operator.observe.objects import read_cache_node, read_policy
from kvtier_operator.observe.store import CACHE_NODES, KINDS, NODES, POLICIES
from kvtier_operator.runtime.disputes import AT_ONCE, LONGEST_SECONDS, Disputes

NOW = 1_796_000_000.0


def stored(policy: Any) -> StoredRevision:
    return StoredRevision(
        name=f"{policy.name}-{policy.revision[:10]}",
        uid="cr",
        policy=policy.name,
        owner_uid=policy.uid,
        number=1,
        revision=policy.revision,
        generation=policy.generation,
        behaviour=policy.behaviour,
    )


def of_policy(policy: Any, *caches: Any) -> PolicyInputs:
    ruled = tuple(RuledNode(c.name, c, 1.0) for c in caches)
    return PolicyInputs(policy, ruled, (), (stored(policy),), Knobs(), NOW)


def written(manager: str, operation: str = "Apply", part: str = "f:spec", **more: str) -> Any:
    return {"manager": manager, "operation": operation, "fieldsV1": {part: {}}, **more}


@pytest.mark.parametrize(
    ("entries", "shared"),
    [
        ([written("kvtier-operator")], False),
        ([written("kvtier-operator"), written("x", part="f:metadata")], False),
        ([written("kvtier-agent", part="f:status", subresource="status")], False),
        ([written("kvtier-operator"), written("kubectl-edit", "Update")], True),
        ([written("kvtier-operator", "Update")], True),
    ],
)
def test_a_spec_with_fields_of_others_is_written_whole(
    a_policy: Any, a_node: Any, a_cache: Any, entries: Any, shared: bool
) -> None:
    raw = {"metadata": {"name": "n", "uid": "u", "managedFields": entries}, "spec": {}}
    assert read_cache_node(raw).shared is shared
    policy = a_policy()
    cache = a_cache("n", policy, shared=shared, orphaned_at=NOW)
    inputs = NodeInputs(
        name="n",
        node=a_node("n"),
        cache=cache,
        ruling=policy,
        holder=policy,
        revisions={policy.revision: stored(policy)},
        report_interval=10,
        knobs=Knobs(),
        now=NOW,
    )
    (action,) = plan_node(inputs).actions
    assert isinstance(action, ApplyNode)
    assert action.whole is shared


def test_conditions_of_others_stay_and_are_no_work(a_policy: Any, a_cache: Any) -> None:
    policy = a_policy()
    cache = a_cache("a", policy)
    status, _, _ = status_of(of_policy(policy, cache))
    foreign = Condition(
        type="Synced", status="True", reason="Sync", last_transition_time="2026-11-30T00:00:00Z"
    )
    mixed = status.model_copy(update={"conditions": (foreign, *status.conditions)})
    assert plan_policy(of_policy(dataclasses.replace(policy, status=mixed), cache)).actions == ()


def test_a_note_is_cut_by_bytes_as_the_api_server_counts(
    a_policy: Any, a_cache: Any, condition: Any
) -> None:
    policy = a_policy()
    caches = []
    for name in "abcde":
        good = a_cache(name, policy)
        stalled = condition("Stalled", "True", "VolumeUnknown", "漢é" * 300)
        caches.append(
            dataclasses.replace(good, report=dataclasses.replace(good.report, stalled=stalled))
        )
    plan = plan_policy(of_policy(policy, *caches))
    (event,) = [a for a in plan.actions if isinstance(a, EmitEvent)]
    assert event.reason is Reason.NodesCannotApply
    assert 1000 < len(event.note.encode()) <= 1024


async def test_a_status_does_not_wait_for_an_event_that_is_refused(
    api: Any, start: Any, monkeypatch: Any
) -> None:
    create = api.create

    async def no_events(resource: Any, content: Any, *, namespace: str = "") -> Any:
        if resource.plural == "events":
            raise Invalid(422, "Invalid", "exceeded quota, or a webhook")
        return await create(resource, content, namespace=namespace)

    monkeypatch.setattr(api, "create", no_events)
    api.put_node("a")
    api.put_policy("chat")
    process = start()
    await process.settle()
    api.report("a")
    await process.settle()
    conditions = api.objects[POLICIES, "chat"]["status"]["conditions"]
    assert {"type": "Ready", "status": "True"}.items() <= conditions[0].items()


async def test_a_status_that_is_refused_keeps_no_revision_from_the_nodes(
    api: Any, start: Any, monkeypatch: Any
) -> None:
    """Rights that were taken away, or a CRD that does not know a field of the status."""
    apply = api.apply
    refuse = True

    async def no_status(resource: Any, name: str, content: Any, **more: Any) -> Any:
        if refuse and resource.plural == POLICIES:
            raise Forbidden(403, "Forbidden", "no")
        return await apply(resource, name, content, **more)

    monkeypatch.setattr(api, "apply", no_status)
    api.put_node("a")
    api.put_policy("chat")
    process = start()
    running = asyncio.create_task(process.reconciler.run())

    async def until(condition: Any) -> None:
        for _ in range(400):
            process.deliver()
            if condition():
                return
            api.now += 0.1
            process.queue.add(("interval", ""))  # wakes the loop: its clock is not ours
            await asyncio.sleep(0)
        raise AssertionError("not in time")

    await until(lambda: (CACHE_NODES, "a") in api.objects)
    assert "stable" in api.objects[CACHE_NODES, "a"]["spec"]
    await until(lambda: process.reconciler.forbidden == 1)
    refuse = False
    await until(lambda: process.reconciler.forbidden == 0)
    assert api.objects[POLICIES, "chat"]["status"]["observedGeneration"] == 1
    running.cancel()


async def test_two_operators_that_disagree_write_ever_more_slowly(api: Any, start: Any) -> None:
    api.put_node("a")
    api.put_policy("chat")
    one, other = start(), start(orphan_grace_seconds=60)
    for _ in range(600):
        await one.settle(0.5)
        await other.settle(0.5)
    specs = [w for w in api.writes if w[1] == f"{CACHE_NODES}/"]
    assert 2 * (AT_ONCE + 1) < len(specs) < 40  # in ten minutes, where it was hundreds


def test_a_write_that_is_undone_is_repeated_at_once_then_seldom() -> None:
    disputes: Disputes[str] = Disputes()
    now, gaps, told = 0.0, [], 0
    for _ in range(14):
        wait = disputes.wait("n", {"a": 1}, now)
        gaps.append(wait)
        now += wait
        told += disputes.wrote("n", {"a": 1}, now)
    assert gaps[: AT_ONCE + 1] == [0.0] * (AT_ONCE + 1)
    assert gaps[AT_ONCE + 1 :][:4] == [1.0, 2.0, 4.0, 8.0]
    assert gaps[-1] == LONGEST_SECONDS
    assert told == 1
    assert disputes.wait("n", {"a": 2}, now) == 0.0  # something new to say
    assert disputes.wait("other", {"a": 1}, now) == 0.0
    assert disputes.wait("n", {"a": 1}, now + 1000) == 0.0
    disputes.forget("n")
    assert disputes.wait("n", {"a": 1}, now) == 0.0


def test_a_dispute_is_about_content_not_about_times() -> None:
    disputes: Disputes[str] = Disputes()
    for i in range(AT_ONCE + 1):
        disputes.wrote("p", {"conditions": [{"type": "Ready", "lastTransitionTime": str(i)}]}, 0.0)
    assert disputes.wait("p", {"conditions": [{"type": "Ready"}]}, 0.0) == 1.0


async def test_a_node_object_that_a_finalizer_holds_is_waited_for(
    api: Any, start: Any, monkeypatch: Any
) -> None:
    api.put_node("a")
    api.put_policy("chat")
    process = start()
    await process.settle()

    async def held(resource: Any, name: str, *, namespace: str = "", uid: str) -> Any:
        api.writes.append(("delete", resource.plural, name))
        raw = api.objects[resource.plural, name]
        raw["metadata"]["deletionTimestamp"] = "2026-11-30T00:00:00Z"
        raw["kind"] = "KVTierNode"
        return api._save(resource.plural, raw, "MODIFIED")

    monkeypatch.setattr(api, "delete", held)
    api.writes.clear()
    api.remove(NODES, "a")
    api.put_node("a")
    await process.settle(60)
    assert [w for w in api.writes if w[1].startswith(CACHE_NODES)] == [("delete", CACHE_NODES, "a")]
    status = api.objects[POLICIES, "chat"]["status"]
    assert status["nodes"]["updated"] == 0  # what is held is about the Node that was
    api.remove(CACHE_NODES, "a")
    await process.settle()
    assert "deletionTimestamp" not in api.objects[CACHE_NODES, "a"]["metadata"]


JUNK: list[Any] = [None, "text", 7, [1], {}, {"a": {"b": []}}, "0001-01-01T00:00:00"]


@pytest.mark.parametrize("junk", JUNK)
def test_no_object_takes_the_operator_down(start: Any, api: Any, junk: Any) -> None:
    """A CRD without a schema lets anything through."""
    process = start()
    versions = itertools.count(1000)
    specs = [junk, *({"valueDensity": {"model": "classic"}, k: junk} for k in SPEC_FIELDS)]
    specs += [{k: junk} for k in NODE_FIELDS]
    specs += [{"policy": {"name": junk}, "stable": {"spec": junk}}]
    statuses = [junk, *({k: junk} for k in STATUS_FIELDS), {"conditions": [junk]}]
    for kind in KINDS:
        for spec in specs:
            for status in statuses:
                meta = {"name": "x", "uid": "u", "resourceVersion": str(next(versions))}
                raw = {"metadata": meta, "spec": spec, "status": status}
                process.reconciler.on_event(kind, "MODIFIED", raw)
    assert set(process.store.policies) == set(process.store.cache_nodes) == {"x"}


SPEC_FIELDS = ("nodeSelector", "priority", "rollout", "tiers", "frozenPrefixes")
NODE_FIELDS = ("nodeUID", "policy", "stable", "orphanedAt", "reportIntervalSeconds")
STATUS_FIELDS = ("observedGeneration", "revision", "lastReportTime", "conditions", "supersededBy")


@pytest.mark.parametrize("junk", [None, "text", [1]])
def test_a_spec_that_cannot_be_read_selects_nothing_new(a_node: Any, junk: Any) -> None:
    policy = read_policy({"metadata": {"name": "p", "uid": "u"}, "spec": junk})
    assert policy.problems
    assert policy.selector is None


def test_a_node_that_is_told_something_else_is_not_updated(a_policy: Any, a_cache: Any) -> None:
    """A spec that went there and back: the agent is about to leave what it reports."""
    policy = a_policy()
    leaving = a_cache("a", policy, stable_revision="0" * 64)
    status, verdict, _ = status_of(of_policy(policy, leaving))
    assert verdict.reason is Reason.RollingOut
    assert find(status.conditions, "Ready").status == "False"  # type: ignore[union-attr]


async def test_a_policy_with_nothing_to_give_takes_nothing_away(api: Any, start: Any) -> None:
    api.put_node("a")
    api.put_policy("good")
    process = start()
    await process.settle()
    before = api.objects[CACHE_NODES, "a"]["spec"]["stable"]
    for spec in ({"page": {"tokens": 100}}, {"rollout": {"paused": True}, "page": {"tokens": 512}}):
        api.put_policy("new", priority=9, **spec)
        await process.settle()
        held = api.objects[CACHE_NODES, "a"]["spec"]
        assert held["policy"]["name"] == "new"
        assert held["stable"] == before
        api.remove(POLICIES, "new")
        await process.settle()
    assert api.objects[CACHE_NODES, "a"]["spec"]["stable"] == before


def test_a_paused_policy_says_so_when_its_spec_went_back(a_policy: Any, a_cache: Any) -> None:
    old = a_policy()
    new = a_policy(spec={"page": {"tokens": 512}})
    first, _, _ = status_of(of_policy(old, a_cache("a", old), a_cache("b", old)))
    back = a_policy(spec={"rollout": {"paused": True}}, generation=3, status=first)
    assert back.revision == old.revision
    _, verdict, _ = status_of(of_policy(back, a_cache("a", old), a_cache("b", new)))
    assert verdict.reason is Reason.Paused
    assert "1 of 2 nodes do not get" in verdict.message


async def test_a_revision_that_somebody_spoiled_and_deleted_is_there_again_in_ten_seconds(
    api: Any, start: Any
) -> None:
    api.put_node("a")
    api.put_policy("chat")
    process = start()
    await process.settle()
    ((plural, name),) = [key for key in api.objects if key[0] == "controllerrevisions"]
    sound = copy.deepcopy(api.objects[plural, name])
    api.objects[plural, name]["data"] = {"revision": "f" * 64, "spec": {}}
    process = start()
    await process.settle()

    def reason() -> str:
        conditions = api.objects["kvtierpolicies", "chat"]["status"]["conditions"]
        return str(next(c["reason"] for c in conditions if c["type"] == "Stalled"))

    assert reason() == "RevisionConflict"
    api.remove(plural, name)
    await process.settle(12.0)
    assert reason() != "RevisionConflict"
    assert api.objects[plural, name]["data"] == sound["data"]
