"""What a policy says about itself, rule by rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from kvtier_api.conditions import find
from kvtier_api.policy import PolicyStatus
from kvtier_api.reasons import Reason
from kvtier_operator.decide.facts import AgentReport, StoredRevision
from kvtier_operator.decide.gather import Knobs, PolicyInputs, RuledNode
from kvtier_operator.decide.plan import ApplyStatus, DropRevision, EmitEvent, StoreRevision
from kvtier_operator.decide.policy import CONFLICT_SECONDS, plan_policy, status_of

NOW = 1_796_000_000.0


def stored(policy: Any, **facts: Any) -> StoredRevision:
    base = StoredRevision(
        name=f"{policy.name}-{policy.revision[:10]}",
        uid="cr-1",
        policy=policy.name,
        owner_uid=policy.uid,
        number=1,
        revision=policy.revision,
        generation=policy.generation,
        behaviour=policy.behaviour or {},
    )
    return dataclasses.replace(base, **facts)


@pytest.fixture
def inputs() -> Callable[..., PolicyInputs]:
    def build(policy: Any, caches: Any = (), *, silent: float = 1.0, **facts: Any) -> PolicyInputs:
        base: dict[str, Any] = {
            "policy": policy,
            "ruled": tuple(RuledNode(c.name, c, silent) for c in caches),
            "superseded": (),
            "revisions": (stored(policy),) if policy.revision else (),
            "knobs": Knobs(),
            "now": NOW,
        }
        return PolicyInputs(**{**base, **facts})

    return build


def said(inputs: PolicyInputs) -> tuple[str, str, str, str]:
    """(reason of Ready, and the status of Ready, Reconciling, Stalled)."""
    status, _, _ = status_of(inputs)
    by_type = {c.type: c for c in status.conditions}
    assert set(by_type) == {"Ready", "Reconciling", "Stalled"}
    assert all(c.observed_generation == inputs.policy.generation for c in status.conditions)
    return (
        by_type["Ready"].reason,
        by_type["Ready"].status,
        by_type["Reconciling"].status,
        by_type["Stalled"].status,
    )


def test_in_force_on_every_node(a_policy: Any, a_cache: Any, inputs: Any) -> None:
    policy = a_policy()
    caches = [a_cache("a", policy), a_cache("b", policy)]
    assert said(inputs(policy, caches)) == ("InForce", "True", "False", "False")
    status, _, _ = status_of(inputs(policy, caches))
    assert status.active_revision == status.desired_revision == policy.revision
    counts = {"selected": 2, "ready": 2, "updated": 2, "stale": 0, "summary": "2/2"}
    assert status.nodes is not None
    assert status.nodes.to_dict() == counts


def test_on_its_way(a_policy: Any, a_cache: Any, inputs: Any) -> None:
    policy = a_policy()
    caches = [a_cache("a", policy), a_cache("b", policy, report=AgentReport(revision="0" * 64))]
    assert said(inputs(policy, caches)) == ("RollingOut", "False", "True", "False")
    status, _, _ = status_of(inputs(policy, caches))
    assert status.active_revision == ""
    assert "1 of 2" in find(status.conditions, "Ready").message  # type: ignore[union-attr]


def test_a_silent_node_is_never_a_success(a_policy: Any, a_cache: Any, inputs: Any) -> None:
    policy = a_policy()
    caches = [a_cache("a", policy)]
    assert said(inputs(policy, caches, silent=29.0))[0] == "InForce"
    assert said(inputs(policy, caches, silent=30.0)) == ("NodesStale", "False", "False", "False")
    status, _, _ = status_of(inputs(policy, caches, silent=30.0))
    assert status.nodes is not None
    assert (status.nodes.stale, status.nodes.updated, status.nodes.ready) == (1, 0, 0)
    assert status.active_revision == ""


def test_the_next_look_is_when_the_next_node_may_turn_stale(
    a_policy: Any, a_cache: Any, inputs: Any
) -> None:
    policy = a_policy()
    found = inputs(policy, [a_cache("a", policy)], silent=12.0)
    assert plan_policy(found).look_again_after == 18.0


def test_agents_that_refuse_the_revision_stall_the_policy(
    a_policy: Any, a_cache: Any, inputs: Any, condition: Any
) -> None:
    policy = a_policy()
    refuses = AgentReport(
        observed_generation=1,
        revision="0" * 64,
        ready=condition("Ready", "True"),
        stalled=condition("Stalled", "True", "VolumeUnknown", "volume data9 is not mapped"),
    )
    found = inputs(policy, [a_cache("a", policy), a_cache("b", policy, report=refuses)])
    assert said(found) == ("NodesCannotApply", "False", "False", "True")
    message = find(status_of(found)[0].conditions, "Stalled").message  # type: ignore[union-attr]
    assert "b (VolumeUnknown: volume data9 is not mapped)" in message


def test_a_refusal_of_an_older_spec_is_no_refusal_of_this_one(
    a_policy: Any, a_cache: Any, inputs: Any, condition: Any
) -> None:
    policy = a_policy()
    old = AgentReport(observed_generation=1, stalled=condition("Stalled", "True", "VolumeFull"))
    found = inputs(policy, [a_cache("a", policy, generation=2, report=old)])
    assert said(found)[0] == "RollingOut"


def test_fields_that_a_node_cannot_obey_are_named(a_policy: Any, a_cache: Any, inputs: Any) -> None:
    policy = a_policy()
    cache = a_cache("a", policy)
    report = dataclasses.replace(cache.report, not_applied=("tiers.hbm",))
    found = inputs(policy, [dataclasses.replace(cache, report=report)])
    assert said(found) == ("PartlyApplied", "True", "False", "False")
    assert "tiers.hbm" in find(status_of(found)[0].conditions, "Ready").message  # type: ignore[union-attr]


def test_an_agent_that_is_not_well(
    a_policy: Any, a_cache: Any, inputs: Any, condition: Any
) -> None:
    policy = a_policy()
    cache = a_cache("a", policy)
    sick = dataclasses.replace(
        cache.report, ready=condition("Ready", "False", "Unhealthy", "the mover is not alive")
    )
    found = inputs(policy, [dataclasses.replace(cache, report=sick)])
    assert said(found) == ("NodesNotReady", "False", "False", "False")


def test_no_node_matches(a_policy: Any, inputs: Any) -> None:
    found = inputs(a_policy(selector={"gpu": "b200"}))
    assert said(found) == ("NoNodesSelected", "True", "False", "False")
    assert "gpu=b200" in find(status_of(found)[0].conditions, "Ready").message  # type: ignore[union-attr]


def test_all_nodes_lost_to_others(a_policy: Any, inputs: Any) -> None:
    found = inputs(a_policy(), superseded=tuple((f"n{i:02}", "other") for i in range(60)))
    assert said(found) == ("Superseded", "True", "False", "False")
    status, _, _ = status_of(found)
    assert len(status.superseded_by) == 50
    said_of_them = find(status.conditions, "Ready").message  # type: ignore[union-attr]
    assert said_of_them == "other policies rule all 60 nodes that nodeSelector matches: other"
    assert status.nodes.selected == 0  # those that it rules


def test_paused_holds_a_new_revision_back(a_policy: Any, a_cache: Any, inputs: Any) -> None:
    old = a_policy()
    new = a_policy(
        spec={"page": {"tokens": 512}, "rollout": {"paused": True}},
        generation=2,
        status=PolicyStatus(active_revision=old.revision, desired_revision=old.revision),
    )
    caches = [a_cache("a", old)]
    assert said(inputs(new, caches)) == ("Paused", "False", "True", "False")
    status, _, _ = status_of(inputs(new, caches))
    assert (status.active_revision, status.desired_revision) == (old.revision, new.revision)
    unchanged = a_policy(
        spec={"rollout": {"paused": True}},
        status=PolicyStatus(active_revision=old.revision, desired_revision=old.revision),
    )
    assert said(inputs(unchanged, caches))[0] == "InForce"


def test_an_invalid_spec_keeps_the_last_good_revision(
    a_policy: Any, a_cache: Any, inputs: Any
) -> None:
    good = a_policy()
    bad = a_policy(
        spec={"page": {"tokens": 100}},
        generation=2,
        status=PolicyStatus(active_revision=good.revision, desired_revision=good.revision),
    )
    assert bad.revision == ""
    found = inputs(bad, [a_cache("a", good)])
    assert said(found) == ("InvalidSpec", "False", "False", "True")
    status, _, _ = status_of(found)
    assert status.active_revision == status.desired_revision == good.revision
    assert status.observed_generation == 2
    assert "multiple of 16" in find(status.conditions, "Stalled").message  # type: ignore[union-attr]


def test_a_revision_with_other_content_is_a_conflict(a_policy: Any, inputs: Any) -> None:
    policy = a_policy()
    found = inputs(policy, revisions=(stored(policy, revision="f" * 64),))
    assert said(found) == ("RevisionConflict", "False", "False", "True")
    plan = plan_policy(found)
    assert not [a for a in plan.actions if isinstance(a, StoreRevision)]
    assert plan.look_again_after is not None
    assert plan.look_again_after <= CONFLICT_SECONDS, "whoever mends it is not seen otherwise"


def test_one_generation_never_makes_revisions_without_end(a_policy: Any, inputs: Any) -> None:
    policy = a_policy()
    others = tuple(
        stored(policy, name=f"p-{i}", revision=f"{i:064}", uid=f"cr-{i}") for i in range(3)
    )
    found = inputs(policy, revisions=others)
    assert said(found)[0] == "RevisionConflict"
    assert not [a for a in plan_policy(found).actions if isinstance(a, StoreRevision)]
    two = inputs(policy, revisions=others[:2])
    assert [a for a in plan_policy(two).actions if isinstance(a, StoreRevision)]


def test_a_revision_of_a_former_policy_of_that_name_is_made_anew(
    a_policy: Any, inputs: Any
) -> None:
    policy = a_policy()
    found = inputs(policy, revisions=(stored(policy, owner_uid="gone"),))
    actions = plan_policy(found).actions
    assert isinstance(actions[0], DropRevision)
    assert isinstance(actions[1], StoreRevision)


def test_history_is_capped_and_what_is_in_use_stays(
    a_policy: Any, a_cache: Any, inputs: Any
) -> None:
    policy = a_policy()
    old = tuple(
        stored(policy, name=f"p-{i:02}", revision=f"{i:064}", number=i, generation=0)
        for i in range(12)
    )
    cache = a_cache("a", policy, stable_revision=f"{0:064}")
    found = inputs(policy, [cache], revisions=(*old, stored(policy, number=99)))
    dropped = [a.name for a in plan_policy(found).actions if isinstance(a, DropRevision)]
    assert dropped == ["p-01", "p-02", "p-03"]


def test_one_event_per_transition_and_before_the_status(
    a_policy: Any, a_cache: Any, inputs: Any
) -> None:
    policy = a_policy()
    found = inputs(policy, [a_cache("a", policy)])
    actions = plan_policy(found).actions
    assert [type(a) for a in actions] == [EmitEvent, ApplyStatus]
    assert actions[0] == plan_policy(found).actions[0]
    status, _, _ = status_of(found)
    settled = dataclasses.replace(policy, status=status)
    assert plan_policy(inputs(settled, [a_cache("a", policy)])).actions == ()
    later = dataclasses.replace(inputs(settled, [a_cache("a", policy)]), now=NOW + 1e6)
    assert plan_policy(later).actions == ()


def test_what_comes_back_is_told_again(a_policy: Any, a_cache: Any, inputs: Any) -> None:
    policy, told = a_policy(), []
    for step, silent in enumerate((0.0, 99.0, 0.0, 99.0)):
        found = inputs(policy, [a_cache("a", policy)], silent=silent, now=NOW + 60 * step)
        told += [a for a in plan_policy(found).actions if isinstance(a, EmitEvent)]
        policy = dataclasses.replace(policy, status=status_of(found)[0])
    assert [event.reason for event in told] == 2 * [Reason.InForce, Reason.NodesStale]
    assert len({event.name for event in told}) == 4


def test_transition_times_move_only_with_the_status(
    a_policy: Any, a_cache: Any, inputs: Any
) -> None:
    policy = a_policy()
    first, _, _ = status_of(inputs(policy, [a_cache("a", policy)]))
    again = dataclasses.replace(policy, status=first, generation=2)
    later, _, _ = status_of(inputs(again, [a_cache("a", policy)], now=NOW + 60))
    assert [c.last_transition_time for c in later.conditions] == [
        c.last_transition_time for c in first.conditions
    ]
    turned, _, _ = status_of(inputs(again, [a_cache("a", policy)], silent=99.0, now=NOW + 60))
    before, after = find(first.conditions, "Ready"), find(turned.conditions, "Ready")
    assert before is not None
    assert after is not None
    assert after.last_transition_time > before.last_transition_time


def test_hands_off_is_said_once(a_policy: Any, inputs: Any) -> None:
    policy = a_policy(hands_off=True)
    (action,) = plan_policy(inputs(policy)).actions
    assert isinstance(action, ApplyStatus)
    conditions = action.status["conditions"]
    assert [(c["type"], c["reason"]) for c in conditions] == [
        ("Reconciling", Reason.ReconcilePaused.value)
    ]
    status = PolicyStatus.read(action.status)
    assert plan_policy(inputs(a_policy(hands_off=True, status=status))).actions == ()
