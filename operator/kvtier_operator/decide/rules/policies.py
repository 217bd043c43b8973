"""What a policy's conditions say: ordered rules, the first that speaks decides.

The conditions follow kstatus: *Stalled* is True when nothing will come of it without a person,
*Reconciling* is True while the cluster is on its way to the spec, and *Ready* is True when the spec
is in force. A policy that has nothing to do (it selects no node, or others rule all its nodes) is
Ready: there is nothing to wait for, and its message says what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvtier_api.reasons import Reason
from kvtier_api.revision import SHORT, revision_name

from kvtier_operator.decide.gather import PolicyInputs
from kvtier_operator.decide.selection import describe
from kvtier_operator.decide.tally import Tally

__all__ = ["RULES", "Situation", "Verdict", "judge"]

NAMED_NODES: Final = 5
"""Nodes that a message names; the rest is a number."""
MAX_REVISIONS_PER_GENERATION: Final = 3


@dataclass(frozen=True, slots=True)
class Situation:
    """What the rules look at."""

    inputs: PolicyInputs
    tally: Tally
    desired: str
    active: str

    @property
    def settled(self) -> bool:
        """The desired revision is in force on every ruled node."""
        return bool(self.desired) and self.tally.updated == self.tally.selected


@dataclass(frozen=True, slots=True)
class Verdict:
    """``ready`` and so on are the status of the three conditions."""

    reason: Reason
    message: str
    ready: bool = False
    reconciling: bool = False
    stalled: bool = False


Rule = Callable[[Situation], Verdict | None]


def deleting(s: Situation) -> Verdict | None:
    """Somebody else's finalizer still holds the policy."""
    if not s.inputs.policy.deleting:
        return None
    return Verdict(Reason.Deleting, Reason.Deleting.say(), reconciling=True)


def invalid_spec(s: Situation) -> Verdict | None:
    """The same rules as in the CRD and in ``kvtier policy validate`` say no."""
    problems = s.inputs.policy.problems
    if not problems:
        return None
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    message = Reason.InvalidSpec.say(problem=problems[0] + more, active=_short(s.active))
    return Verdict(Reason.InvalidSpec, message, stalled=True)


def revision_conflict(s: Situation) -> Verdict | None:
    """The ControllerRevision of that name has other content, or one generation made too many."""
    policy = s.inputs.policy
    name = revision_name(policy.name, policy.revision)
    stored = {r.name: r for r in s.inputs.revisions or ()}
    found = stored.get(name)
    if found is not None and found.revision != policy.revision:
        return Verdict(
            Reason.RevisionConflict, Reason.RevisionConflict.say(name=name), stalled=True
        )
    if found is None and made_for_generation(s.inputs) >= MAX_REVISIONS_PER_GENERATION:
        message = (
            f"generation {policy.generation} of this policy already has "
            f"{MAX_REVISIONS_PER_GENERATION} revisions: operators of different versions disagree "
            "about the hash; run one version, then delete the revisions that are too many"
        )
        return Verdict(Reason.RevisionConflict, message, stalled=True)
    return None


def nothing_selected(s: Situation) -> Verdict | None:
    """No node matches."""
    if s.tally.selected or s.inputs.superseded:
        return None
    message = Reason.NoNodesSelected.say(selector=describe(s.inputs.policy.selector))
    return Verdict(Reason.NoNodesSelected, message, ready=True)


def superseded(s: Situation) -> Verdict | None:
    """Other policies rule every node that it selects."""
    if s.tally.selected:
        return None
    rulers = sorted({by for _, by in s.inputs.superseded})
    message = Reason.Superseded.say(count=len(s.inputs.superseded), policies=_list(rulers))
    return Verdict(Reason.Superseded, message, ready=True)


def cannot_apply(s: Situation) -> Verdict | None:
    """Agents refuse the revision and keep the last good one."""
    refusing = s.tally.cannot_apply
    if not refusing:
        return None
    message = Reason.NodesCannotApply.say(
        count=len(refusing), revision=_short(s.desired), nodes=_named(refusing)
    )
    return Verdict(
        Reason.NodesCannotApply,
        message,
        stalled=True,
        reconciling=s.tally.updated + len(refusing) < s.tally.selected,
    )


def paused(s: Situation) -> Verdict | None:
    """``rollout.paused`` holds the desired revision back, on some node at least: the active one may
    be what the spec asks for again while some nodes had left it."""
    if not s.inputs.policy.paused or s.settled:
        return None
    if s.active == s.desired and not s.tally.held_back:
        return None
    message = Reason.Paused.say(
        count=s.tally.without, selected=s.tally.selected, desired=_short(s.desired)
    )
    return Verdict(Reason.Paused, message, reconciling=True)


def rolling_out(s: Situation) -> Verdict | None:
    """Nodes that do report do not have it yet."""
    if s.tally.updated + len(s.tally.stale) >= s.tally.selected:
        return None
    message = Reason.RollingOut.say(
        updated=s.tally.updated, selected=s.tally.selected, revision=_short(s.desired)
    )
    return Verdict(Reason.RollingOut, message, reconciling=True)


def stale(s: Situation) -> Verdict | None:
    """No data is never success."""
    if not s.tally.stale:
        return None
    message = Reason.NodesStale.say(
        count=len(s.tally.stale), selected=s.tally.selected, nodes=_list(s.tally.stale)
    )
    return Verdict(Reason.NodesStale, message)


def not_ready(s: Situation) -> Verdict | None:
    """The revision is in force, but agents say that they are not well."""
    troubled = s.tally.not_ready
    if not troubled:
        return None
    message = Reason.NodesNotReady.say(
        count=len(troubled), selected=s.tally.selected, nodes=_named(troubled)
    )
    return Verdict(Reason.NodesNotReady, message)


def partly_applied(s: Situation) -> Verdict | None:
    """In force but for fields that the nodes' shape cannot obey."""
    if not s.tally.not_applied:
        return None
    message = Reason.PartlyApplied.say(
        revision=_short(s.desired), fields=_list(s.tally.not_applied)
    )
    return Verdict(Reason.PartlyApplied, message, ready=True)


def in_force(s: Situation) -> Verdict | None:
    """All is well."""
    message = Reason.InForce.say(revision=_short(s.desired))
    return Verdict(Reason.InForce, message, ready=True)


RULES: Final[tuple[Rule, ...]] = (
    deleting,
    invalid_spec,
    revision_conflict,
    nothing_selected,
    superseded,
    cannot_apply,
    paused,
    rolling_out,
    stale,
    not_ready,
    partly_applied,
    in_force,
)


def judge(situation: Situation) -> Verdict:
    """The verdict of the first rule that has one."""
    for rule in RULES:
        verdict = rule(situation)
        if verdict is not None:
            return verdict
    raise AssertionError("the last rule always decides")


def made_for_generation(inputs: PolicyInputs) -> int:
    """Revisions that exist for the policy's present generation."""
    policy = inputs.policy
    return sum(
        r.generation == policy.generation and r.owner_uid == policy.uid
        for r in inputs.revisions or ()
    )


def _short(revision: str) -> str:
    return revision[:SHORT] or "(none)"


def _list(names: Sequence[str]) -> str:
    more = len(names) - NAMED_NODES
    text = ", ".join(names[:NAMED_NODES])
    return f"{text} and {more} more" if more > 0 else text


def _named(nodes: Sequence[tuple[str, str]]) -> str:
    return _list([f"{name} ({why[:120]})" for name, why in nodes])
