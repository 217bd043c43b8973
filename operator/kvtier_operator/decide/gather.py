"""From the store to the immutable inputs of one decision.

Everything a rule may look at is collected here, once; rules never reach back into the store. `now`
is seconds since 1970 and is passed in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvtier_operator.decide.facts import CacheNode, ClusterNode, Policy, StoredRevision

__all__ = ["Knobs", "NodeInputs", "PolicyInputs", "RuledNode", "gather_node", "gather_policy"]


@dataclass(frozen=True, slots=True)
class Knobs:
    """The settings that decisions depend on."""

    orphan_grace_seconds: int = 3600
    history_limit: int = 10


class Snapshot(Protocol):
    """The part of the store that is read here."""

    policies: dict[str, Policy]
    nodes: dict[str, ClusterNode]
    cache_nodes: dict[str, CacheNode]
    revisions: dict[str, dict[str, StoredRevision]]
    reported_at: dict[str, float]
    orphan_seen: dict[str, float]
    candidates: dict[str, tuple[str, ...]]
    selected: dict[str, set[str]]

    def ruled(self, policy: str) -> list[str]:
        """Nodes that a policy rules, by name."""
        ...


@dataclass(frozen=True, slots=True)
class NodeInputs:
    """One node."""

    name: str
    node: ClusterNode | None
    cache: CacheNode | None
    ruling: Policy | None
    """The policy that rules the node now."""
    holder: Policy | None
    """The policy that the KVTierNode names, where it still exists."""
    revisions: Mapping[str, StoredRevision]
    """Revisions of the ruling policy, by hash."""
    report_interval: int
    knobs: Knobs
    now: float
    orphaned_for: float | None = None
    """Seconds since this process first saw its KVTierNode orphaned; None where it is not."""


@dataclass(frozen=True, slots=True)
class RuledNode:
    """A node as its policy's status sees it. ``silent``: seconds of seen time since its agent
    reported, None where there is no KVTierNode yet."""

    name: str
    cache: CacheNode | None
    silent: float | None


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """One policy, the nodes it rules and those it lost to others."""

    policy: Policy
    ruled: tuple[RuledNode, ...]
    superseded: tuple[tuple[str, str], ...]
    """(node, policy that rules it), by node."""
    revisions: tuple[StoredRevision, ...] | None
    """None: not read yet."""
    knobs: Knobs
    now: float


def gather_node(
    snapshot: Snapshot,
    name: str,
    *,
    report_interval: int,
    knobs: Knobs,
    now: float,
    monotonic: float,
) -> NodeInputs:
    """Inputs for ``name``; O(1) in the size of the cluster. ``monotonic``: seconds of the clock
    that the store dates orphans by."""
    cache = snapshot.cache_nodes.get(name)
    names = snapshot.candidates.get(name)
    ruling = snapshot.policies.get(names[0]) if names else None
    holder = snapshot.policies.get(cache.policy.name) if cache and cache.policy else None
    if holder is not None and cache and cache.policy and holder.uid != cache.policy.uid:
        holder = None
    stored = snapshot.revisions.get(ruling.name, {}) if ruling else {}
    orphaned = snapshot.orphan_seen.get(name)
    return NodeInputs(
        name=name,
        node=snapshot.nodes.get(name),
        cache=cache,
        ruling=ruling,
        holder=holder,
        revisions={r.revision: r for r in stored.values() if ruling and r.owner_uid == ruling.uid},
        report_interval=report_interval,
        knobs=knobs,
        now=now,
        orphaned_for=None if orphaned is None else monotonic - orphaned,
    )


def gather_policy(
    snapshot: Snapshot, name: str, *, seen: float, knobs: Knobs, now: float
) -> PolicyInputs | None:
    """Inputs for ``name``, None where it does not exist; O(nodes that it selects).

    ``seen``: seen time of the KVTierNode watch, in seconds."""
    policy = snapshot.policies.get(name)
    if policy is None:
        return None
    ruled, superseded = [], []
    for node in sorted(snapshot.selected.get(name, ())):
        ruler = snapshot.candidates[node][0]
        if ruler != name:
            superseded.append((node, ruler))
            continue
        reported = snapshot.reported_at.get(node)
        silent = None if reported is None else max(0.0, seen - reported)
        ruled.append(RuledNode(node, snapshot.cache_nodes.get(node), silent))
    stored = snapshot.revisions.get(name)
    return PolicyInputs(
        policy=policy,
        ruled=tuple(ruled),
        superseded=tuple(superseded),
        revisions=None if stored is None else tuple(stored.values()),
        knobs=knobs,
        now=now,
    )
