"""Which revision a node of a policy is to run.

- In the normal case: the one that the spec asks for, once it is stored (a ControllerRevision is
  written before any node gets its content, so that history is never behind the nodes).
- ``rollout.paused``: nothing moves. A node keeps what it has from this policy; a node that has
  nothing from it gets the active revision.
- The spec is invalid: the last good one, which status calls desired; then the active one.
- None at all (a policy that was born paused, or invalid): the node keeps what it has, even from
  another policy, because taking a working revision away helps nobody; a node that has nothing knows
  its policy, and no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtier_operator.decide.facts import CacheNode, Policy, StoredRevision

__all__ = ["Target", "report_interval", "target_of"]

LEAST_INTERVAL_SECONDS = 10
REPORTS_PER_SECOND = 50


@dataclass(frozen=True, slots=True)
class Target:
    """``revision`` is "" and ``behaviour`` empty where there is none to give."""

    why: str
    revision: str = ""
    behaviour: Mapping[str, Any] = field(default_factory=dict)


def target_of(
    policy: Policy, revisions: Mapping[str, StoredRevision], cache: CacheNode | None
) -> Target | None:
    """The revision for one node; None: wait until it is stored.

    ``revisions``: those of the policy, by hash."""
    if policy.revision and policy.behaviour is not None and not policy.paused:
        if policy.revision not in revisions:
            return None
        return Target("InStep", policy.revision, policy.behaviour)
    why = "Paused" if policy.revision else "InvalidSpec"
    if policy.paused:
        kept = _kept(cache)
        if kept is not None and _is_from(policy, cache):
            return Target(why, *kept)
        wishes = [policy.status.active_revision]
    else:
        wishes = [policy.status.desired_revision, policy.status.active_revision]
    for wish in wishes:
        if wish in revisions:
            return Target(why, wish, revisions[wish].behaviour)
    kept = _kept(cache)
    return Target(why) if kept is None else Target(why, *kept)


def _is_from(policy: Policy, cache: CacheNode | None) -> bool:
    return cache is not None and cache.policy is not None and cache.policy.uid == policy.uid


def _kept(cache: CacheNode | None) -> tuple[str, Mapping[str, Any]] | None:
    if cache is None:
        return None
    if not cache.stable_revision or cache.stable_spec is None:
        return None
    return cache.stable_revision, cache.stable_spec


def report_interval(nodes: int) -> int:
    """Seconds between two reports of one agent, so that all together make at most about 50 writes
    a second: max(10, ceil(nodes / 50))."""
    return max(LEAST_INTERVAL_SECONDS, -(-nodes // REPORTS_PER_SECOND))
