"""What is to be done for a policy: its revisions, its status, an event.

Order matters for a process that may be killed between any two writes. The ControllerRevision is
stored first, and nodes get a revision only once it is stored. The event goes out before the status:
killed in between, the same event is planned again, under the same name, and the API server
says that it exists. Status comes last and is what says that it is done.
"""

from __future__ import annotations

import hashlib
from typing import Final

from kvtier_api.conditions import Condition, find, with_condition
from kvtier_api.policy import PolicyStatus, Superseding
from kvtier_api.reasons import Reason
from kvtier_api.revision import revision_name

from kvtier_operator.decide.facts import Policy, StoredRevision
from kvtier_operator.decide.gather import PolicyInputs
from kvtier_operator.decide.plan import (
    Action,
    ApplyStatus,
    DropRevision,
    EmitEvent,
    Plan,
    StoreRevision,
)
from kvtier_operator.decide.rules.policies import Situation, Verdict, judge
from kvtier_operator.decide.tally import tally

__all__ = ["plan_policy", "status_of"]

MAX_SUPERSEDED: Final = 50
MAX_NOTE_BYTES: Final = 1024
"""The API server counts the bytes of a note, of a condition's message the characters."""
CONFLICT_SECONDS: Final = 10.0
"""While a stored revision is in conflict it is read this often."""
_OURS: Final = ("Ready", "Reconciling", "Stalled")
_WORRYING: Final = (Reason.NodesStale, Reason.NodesNotReady)


def plan_policy(inputs: PolicyInputs) -> Plan:
    """The plan for one policy. Revisions must have been read where it is not hands-off."""
    policy = inputs.policy
    if policy.hands_off:
        return _hands_off(inputs)
    status, verdict, next_stale = status_of(inputs)
    actions: list[Action] = [*_store(inputs, verdict), *_prune(inputs, status)]
    if status != _ours(policy.status):
        actions += [*_events(policy, status, verdict), _apply(policy, status)]
    again = next_stale
    if verdict.reason is Reason.RevisionConflict:
        # Whoever mends it touches a ControllerRevision, which is read and not watched.
        again = min(CONFLICT_SECONDS, again or CONFLICT_SECONDS)
    return Plan(verdict.reason.value, tuple(actions), again)


def status_of(inputs: PolicyInputs) -> tuple[PolicyStatus, Verdict, float | None]:
    """(status, verdict, seconds of seen time until a node may turn stale)."""
    policy = inputs.policy
    before = policy.status
    desired = policy.revision or before.desired_revision
    counted = tally(inputs.ruled, desired)
    active = before.active_revision
    vacuous = counted.selected == 0 and bool(policy.revision) and not policy.paused
    if desired and (vacuous or 0 < counted.selected == counted.updated):
        active = desired
    verdict = judge(Situation(inputs, counted, desired, active))
    status = PolicyStatus(
        observed_generation=policy.generation,
        active_revision=active,
        desired_revision=desired,
        nodes=counted.counts,
        superseded_by=tuple(
            Superseding(node=node, policy=by) for node, by in inputs.superseded[:MAX_SUPERSEDED]
        ),
        conditions=_conditions(before.conditions, verdict, policy.generation, inputs.now),
    )
    return status, verdict, counted.next_stale_after


def _conditions(
    before: tuple[Condition, ...], verdict: Verdict, generation: int, now: float
) -> tuple[Condition, ...]:
    """The three conditions; each names the verdict where it is about it."""
    about = {
        "Ready": (verdict.ready, None),
        "Reconciling": (verdict.reconciling, Reason.Settled),
        "Stalled": (verdict.stalled, Reason.Progressing),
    }
    conditions = tuple(c for c in before if c.type in _OURS)
    for type_, (is_so, otherwise) in about.items():
        reason, message = verdict.reason, verdict.message
        if otherwise is not None and not is_so:
            reason, message = otherwise, otherwise.say()
        conditions = with_condition(
            conditions,
            type_,
            "True" if is_so else "False",
            reason,
            message,
            now=now,
            generation=generation,
        )
    return conditions


def _hands_off(inputs: PolicyInputs) -> Plan:
    """Said once; afterwards nothing is written until the annotation goes."""
    policy = inputs.policy
    said = find(policy.status.conditions, "Reconciling")
    if said is not None and said.reason == Reason.ReconcilePaused:
        return Plan("HandsOff")
    reason = Reason.ReconcilePaused
    status = policy.status.model_copy(
        update={
            "conditions": with_condition(
                _ours(policy.status).conditions,
                "Reconciling",
                "True",
                reason,
                reason.say(),
                now=inputs.now,
                generation=policy.generation,
            )
        }
    )
    return Plan("HandsOff", (_apply(policy, status),))


def _store(inputs: PolicyInputs, verdict: Verdict) -> list[Action]:
    """Store the revision that the spec asks for, unless it is there."""
    policy = inputs.policy
    if not policy.revision or policy.behaviour is None or policy.deleting:
        return []
    if verdict.reason is Reason.RevisionConflict:
        return []
    name = revision_name(policy.name, policy.revision)
    stored = inputs.revisions or ()
    found = next((r for r in stored if r.name == name), None)
    if found is not None and found.owner_uid == policy.uid:
        return []
    create = StoreRevision(
        name=name,
        policy=policy.name,
        policy_uid=policy.uid,
        generation=policy.generation,
        number=1 + max((r.number for r in stored), default=0),
        revision=policy.revision,
        behaviour=policy.behaviour,
    )
    if found is None:
        return [create]
    # It belongs to an earlier policy of the same name and is about to be collected with it.
    return [DropRevision(name, policy.name, found.uid), create]


def _prune(inputs: PolicyInputs, status: PolicyStatus) -> list[DropRevision]:
    """Drop the oldest revisions beyond the limit, never one that is in use."""
    policy = inputs.policy
    stored = [r for r in inputs.revisions or () if r.owner_uid == policy.uid]
    excess = len(stored) - inputs.knobs.history_limit
    if excess <= 0:
        return []
    in_use = {policy.revision, status.active_revision, status.desired_revision}
    in_use |= {policy.status.active_revision, policy.status.desired_revision}
    for node in inputs.ruled:
        if node.cache is not None:
            in_use |= {node.cache.stable_revision, node.cache.report.revision}

    def age(revision: StoredRevision) -> tuple[int, str]:
        return (revision.number, revision.name)

    free = sorted((r for r in stored if r.revision not in in_use), key=age)
    return [DropRevision(r.name, policy.name, r.uid) for r in free[:excess]]


def _events(policy: Policy, status: PolicyStatus, verdict: Verdict) -> list[EmitEvent]:
    """One event per transition: the reason of Ready changed, or the policy stalled."""
    before = find(policy.status.conditions, "Ready")
    if before is not None and before.reason == verdict.reason:
        return []
    since = "" if before is None else before.last_transition_time  # else told once a generation
    identity = "/".join(
        (policy.uid, str(policy.generation), verdict.reason.value, status.desired_revision, since)
    )
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return [
        EmitEvent(
            name=f"{policy.name}.{digest}",
            policy=policy.name,
            policy_uid=policy.uid,
            warning=verdict.stalled or verdict.reason in _WORRYING,
            reason=verdict.reason,
            note=_cut(verdict.message),
        )
    ]


def _ours(status: PolicyStatus) -> PolicyStatus:
    """A status without conditions of types that somebody else keeps there: they stay, and an apply
    that leaves them out would be repeated for ever."""
    kept = tuple(c for c in status.conditions if c.type in _OURS)
    return status.model_copy(update={"conditions": kept})


def _cut(note: str) -> str:
    return note.encode()[:MAX_NOTE_BYTES].decode(errors="ignore")


def _apply(policy: Policy, status: PolicyStatus) -> ApplyStatus:
    return ApplyStatus(policy.name, policy.version, status.to_dict())
