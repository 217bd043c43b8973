"""``KVTierNode.status`` out of a view, a snapshot and counters. Pure; the wall clock is passed in
and is used for nothing but the times that people read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvtier_api.conditions import Condition, ConditionStatus, timestamp, with_condition
from kvtier_api.node import Counters, NodeStatus, TierStatus
from kvtier_api.reasons import Reason
from kvtier_api.validate import InvalidObject, parse

from kvtier_agent.node.lifecycle import Phase, remaining_grace
from kvtier_agent.node.view import NodeView

__all__ = ["make_status", "previous_conditions"]

Verdict = tuple[str, ConditionStatus, Reason, str]
MAX_FIELDS_NAMED = 6
OURS: Final = ("Ready", "Clamped", "Stalled")
"""The conditions that the agent writes."""


def make_status(
    view: NodeView,
    tiers: Sequence[TierStatus],
    counters: Mapping[str, int],
    before: Sequence[Condition],
    *,
    wall: float,
    version: str,
    boot_id: str,
) -> dict[str, Any]:
    """The status as a JSON-ready dict. ``before``: `previous_conditions`, for their transition
    times. ``wall``: seconds since 1970. ``counters``: by the API's Python names;
    names that the API does not know are left out."""
    conditions = tuple(before)
    for type_, status, reason, message in (_ready(view), _clamped(view), _stalled(view)):
        conditions = with_condition(
            conditions, type_, status, reason, message, now=wall, generation=view.generation
        )
    known = {k: v for k, v in counters.items() if k in Counters.model_fields}
    return NodeStatus(
        observed_generation=view.generation,
        agent_version=version,
        boot_id=boot_id,
        last_report_time=timestamp(wall),
        revision=view.in_force,
        not_applied=view.budgets.not_applied if view.budgets and view.in_force else (),
        tiers=tuple(tiers),
        counters=Counters(**known),
        conditions=conditions,
    ).to_dict()


def previous_conditions(status: Mapping[str, Any]) -> tuple[Condition, ...]:
    """The agent's conditions of an object's present status; none where they cannot be read. Others
    keep theirs there too: one that was applied with ours would be ours as well, and stay as it was.
    """
    found = status.get("conditions")
    ours = [
        condition
        for condition in (found if isinstance(found, list) else ())
        if isinstance(condition, Mapping) and condition.get("type") in OURS
    ]
    try:
        return parse(NodeStatus, {"conditions": ours}).conditions
    except InvalidObject:
        return ()


def _ready(view: NodeView) -> Verdict:
    status, reason, message = _readiness(view)
    return "Ready", status, reason, message


def _readiness(view: NodeView) -> tuple[ConditionStatus, Reason, str]:
    if view.stopping:
        return "False", Reason.Stopping, Reason.Stopping.say()
    if view.causes:
        loop, _, error = view.causes[0].partition(": ")
        return "False", Reason.Unhealthy, Reason.Unhealthy.say(loop=loop, error=error)
    if view.cut:
        return "False", Reason.MemoryCut, Reason.MemoryCut.say(tiers=", ".join(view.cut))
    if view.rival:
        return "False", Reason.TwoAgents, Reason.TwoAgents.say(boot_id=view.rival)
    if view.life.phase is Phase.ORPHANED:
        left = remaining_grace(view.life, view.at) or 0.0
        return "False", Reason.NoPolicy, Reason.NoPolicy.say(seconds=round(left))
    if view.life.phase is not Phase.SERVING:
        if view.refusal is not None:
            return "False", view.refusal.reason, view.refusal.message
        if not view.heard or view.wanted:
            return "False", Reason.Starting, Reason.Starting.say(step="no revision was applied yet")
        return "False", Reason.NoPolicy, "no policy rules this node; nothing is held or admitted"
    revision = view.in_force[:10]
    said = [*(view.budgets.notes if view.budgets else ()), *view.restarts]
    if view.unkept:
        said.append(f"{view.unkept}: the counters shown here stand still")
    notes = "".join(f"; {n}" for n in said)
    if view.budgets and view.budgets.not_applied:
        fields = ", ".join(view.budgets.not_applied[:MAX_FIELDS_NAMED])
        message = Reason.PartlyApplied.say(revision=revision, fields=fields)
        return "True", Reason.PartlyApplied, message + notes
    return "True", Reason.InForce, Reason.InForce.say(revision=revision) + notes


def _clamped(view: NodeView) -> Verdict:
    clamps = view.budgets.clamps if view.budgets and view.in_force else ()
    if not clamps:
        return "Clamped", "False", Reason.NotClamped, Reason.NotClamped.say()
    return "Clamped", "True", clamps[0].reason, "; ".join(str(c) for c in clamps)


def _stalled(view: NodeView) -> Verdict:
    if view.refusal is not None:
        stays = (
            f"; revision {view.in_force[:10]} stays in force"
            if view.life.phase is Phase.SERVING
            else ""
        )
        return "Stalled", "True", view.refusal.reason, view.refusal.message + stays
    if view.life.phase is Phase.SERVING:
        return "Stalled", "False", Reason.Applied, Reason.Applied.say()
    if view.heard and not view.wanted:
        return "Stalled", "False", Reason.NoPolicy, "no policy asks for anything"
    return "Stalled", "False", Reason.Starting, "no revision was applied yet"
