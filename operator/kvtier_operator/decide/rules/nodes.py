"""What a node's KVTierNode is to be: ordered rules, the first that speaks decides.

The life of a KVTierNode. It is created when a policy selects the node, and carries that policy's
revision in full. When the Node object goes, it goes. When no policy selects the node any more it
stays, with policy and revision cleared and the time noted in ``orphanedAt``: the agent serves what
it holds for the grace period. After that it is deleted, once. The grace counts from when this
process first saw the node let go: ``orphanedAt`` may be from a clock that was wrong, and a restart
that gives an orphan more time does no harm, since the agent drops its bytes by itself. A node that
comes under another policy takes that policy's revision at once; a Node that was made anew under the
same name is another node, and gets a new KVTierNode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from kvtier_api.conditions import timestamp

from kvtier_operator.decide.facts import PolicyRef
from kvtier_operator.decide.gather import NodeInputs
from kvtier_operator.decide.plan import ApplyNode, DeleteNode, Plan
from kvtier_operator.decide.target import Target, target_of

__all__ = ["RULES", "plan_node"]

Rule = Callable[[NodeInputs], Plan | None]


def already_deleting(inputs: NodeInputs) -> Plan | None:
    """Somebody deletes the KVTierNode: it is made again when it is gone."""
    return Plan("Deleting") if inputs.cache is not None and inputs.cache.deleting else None


def node_gone(inputs: NodeInputs) -> Plan | None:
    """No Node object: no KVTierNode."""
    if inputs.node is not None:
        return None
    if inputs.cache is None:
        return Plan("NothingLeft")
    return Plan("NodeGone", (DeleteNode(inputs.name, inputs.cache.uid),))


def hands_off(inputs: NodeInputs) -> Plan | None:
    """The on-call person has paused the policy that rules or ruled the node."""
    if any(p is not None and p.hands_off for p in (inputs.ruling, inputs.holder)):
        return Plan("HandsOff")
    return None


def node_replaced(inputs: NodeInputs) -> Plan | None:
    """The Node was made anew: its predecessor's reports are not its own."""
    assert inputs.node is not None
    cache = inputs.cache
    if cache is None or not cache.node_uid or cache.node_uid == inputs.node.uid:
        return None
    return Plan("NodeReplaced", (DeleteNode(inputs.name, cache.uid),))


def not_selected(inputs: NodeInputs) -> Plan | None:
    """No policy selects the node."""
    if inputs.ruling is not None:
        return None
    cache = inputs.cache
    if cache is None:
        return Plan("NotSelected")
    since = cache.orphaned_at if cache.policy is None else None
    known = inputs.orphaned_for or 0.0
    if since is not None and known >= inputs.knobs.orphan_grace_seconds:
        return Plan("OrphanRetired", (DeleteNode(inputs.name, cache.uid),))
    wanted = _spec(inputs, None, None, orphaned_at=inputs.now if since is None else since)
    again = max(1.0, inputs.knobs.orphan_grace_seconds - known)
    return Plan("Orphaned", _write_unless_equal(inputs, wanted), again)


def selected(inputs: NodeInputs) -> Plan | None:
    """A policy rules the node: its revision, or none yet."""
    policy = inputs.ruling
    assert policy is not None
    target = target_of(policy, inputs.revisions, inputs.cache)
    if target is None:
        return Plan("RevisionNotStored")
    ref = PolicyRef(policy.name, policy.uid, policy.generation)
    return Plan(target.why, _write_unless_equal(inputs, _spec(inputs, ref, target)))


RULES: Final[tuple[Rule, ...]] = (
    already_deleting,
    node_gone,
    hands_off,
    node_replaced,
    not_selected,
    selected,
)


def plan_node(inputs: NodeInputs) -> Plan:
    """The plan of the first rule that has one."""
    for rule in RULES:
        plan = rule(inputs)
        if plan is not None:
            return plan
    raise AssertionError("the last rule always decides")


def _spec(
    inputs: NodeInputs,
    policy: PolicyRef | None,
    target: Target | None,
    *,
    orphaned_at: float | None = None,
) -> dict[str, Any]:
    assert inputs.node is not None
    spec: dict[str, Any] = {"nodeUID": inputs.node.uid}
    if policy is not None:
        spec["policy"] = {
            "name": policy.name,
            "uid": policy.uid,
            "generation": policy.generation,
        }
    if target is not None and target.revision:
        spec["stable"] = {"revision": target.revision, "spec": dict(target.behaviour)}
    if orphaned_at is not None:
        spec["orphanedAt"] = timestamp(orphaned_at)
    spec["reportIntervalSeconds"] = inputs.report_interval
    spec["orphanGraceSeconds"] = inputs.knobs.orphan_grace_seconds
    return spec


def _write_unless_equal(inputs: NodeInputs, wanted: Mapping[str, Any]) -> tuple[ApplyNode, ...]:
    cache = inputs.cache
    if cache is None:
        return (ApplyNode(inputs.name, wanted),)
    if _held(inputs) == {**wanted, "stable": wanted.get("stable", {}).get("revision", "")}:
        return ()
    return (ApplyNode(inputs.name, wanted, cache.uid, cache.version, whole=cache.shared),)


def _held(inputs: NodeInputs) -> dict[str, Any]:
    """The spec as it stands, the revision by its (verified) hash."""
    cache = inputs.cache
    assert cache is not None
    held: dict[str, Any] = {"nodeUID": cache.node_uid, "stable": cache.stable_revision}
    if cache.stable_spec is not None and not cache.stable_revision:
        held["stable"] = None  # content and name differ: never equal to what is wanted
    if cache.policy is not None:
        held["policy"] = {
            "name": cache.policy.name,
            "uid": cache.policy.uid,
            "generation": cache.policy.generation,
        }
    if cache.orphaned_at is not None:
        held["orphanedAt"] = timestamp(cache.orphaned_at)
    held["reportIntervalSeconds"] = cache.report_interval
    held["orphanGraceSeconds"] = cache.orphan_grace
    return held
