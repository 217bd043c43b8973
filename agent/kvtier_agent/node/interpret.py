"""From a KVTierNode as the API server holds it to what ought to be in force. Pure.

The hash decides whether this agent understands a revision. It is computed over what the agent
could parse, with defaults removed; if it equals the revision's name, then whatever the agent did
not know stands at its default and changes nothing. If not, the fields it does not know matter (the
agent is older than the policy) or the two sides disagree about the API; either way the revision is
not half obeyed: the last good one stays in force, and the reason is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvtier_api.policy import RevisionSpec
from kvtier_api.reasons import Reason
from kvtier_api.revision import revision_hash
from kvtier_api.validate import InvalidObject, parse, unknown_fields

from kvtier_agent.node.desired import Absent, Desired, Problem, Wanted

__all__ = ["DEFAULT_GRACE_SECONDS", "DEFAULT_INTERVAL_SECONDS", "NodeWord", "read_node"]

DEFAULT_INTERVAL_SECONDS: Final = 10.0
DEFAULT_GRACE_SECONDS: Final = 3600.0
"""What holds where no object says otherwise: the defaults of the API."""


@dataclass(frozen=True, slots=True)
class NodeWord:
    """What one sighting of the object says. ``desired`` None: it could not be understood, and what
    was said before stands."""

    desired: Desired | None
    problem: Problem | None
    generation: int
    interval_seconds: float
    grace_seconds: float


def read_node(body: Mapping[str, Any] | None, grace_before: float) -> NodeWord:
    """``body`` None: there is no object (any more), which is the same as an object without a
    policy; the grace is then the one last heard."""
    if body is None:
        return NodeWord(Absent(grace_before), None, -1, DEFAULT_INTERVAL_SECONDS, grace_before)
    spec = _section(body, "spec")
    generation = int((body.get("metadata") or {}).get("generation") or 0)
    interval = _number(spec.get("reportIntervalSeconds"), DEFAULT_INTERVAL_SECONDS)
    grace = _number(spec.get("orphanGraceSeconds"), DEFAULT_GRACE_SECONDS)
    policy, stable = _section(spec, "policy"), _section(spec, "stable")
    desired: Desired | None
    problem: Problem | None = None
    if not policy or not stable:
        desired = Absent(grace, generation)
    else:
        desired, problem = _revision(
            str(stable.get("revision") or ""),
            stable.get("spec") or {},
            str(policy.get("name") or ""),
            generation,
        )
    return NodeWord(desired, problem, generation, interval, grace)


def _revision(
    revision: str, spec: Mapping[str, Any], policy: str, generation: int
) -> tuple[Wanted | None, Problem | None]:
    try:
        parsed = parse(RevisionSpec, spec)
    except InvalidObject as e:
        return None, _problem(Reason.InvalidRevision, revision, str(e), generation)
    if revision_hash(parsed) == revision:
        return Wanted(revision, parsed, policy, generation), None
    unknown = sorted(unknown_fields(RevisionSpec, spec))
    if unknown:
        fields = ", ".join(unknown[:8]) + (" and more" if len(unknown) > 8 else "")
        message = Reason.UnknownFields.say(fields=fields)
        return None, Problem(Reason.UnknownFields, message, generation)
    what = "its content has another hash"
    return None, _problem(Reason.InvalidRevision, revision, what, generation)


def _problem(reason: Reason, revision: str, problem: str, generation: int) -> Problem:
    return Problem(reason, reason.say(revision=revision[:10], problem=problem), generation)


def _section(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Empty where there is none, or something that is no section."""
    value = body.get(name)
    return value if isinstance(value, Mapping) else {}


def _number(value: object, default: float) -> float:
    return float(value) if isinstance(value, int | float) and value >= 0 else default
