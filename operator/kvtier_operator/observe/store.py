"""What the cluster looks like, held in memory: three kinds of facts and one index.

The store is filled from three sides, and any order of arrival gives the same content:

- `replace` with a complete list (start, and after every lost connection). It is the truth as of its
  resourceVersion: what is absent has been deleted, although no event ever said so, and events that
  are not newer are ignored, although they may still sit in a queue;
- `observe` / `remove` with single events, newer resourceVersion wins;
- the same two with the answers to the operator's own writes, so that it does not act twice on what
  it has not yet heard back.

Each returns the keys whose decision may differ now. An event that changes no fact returns nothing:
heartbeats of kubelets and counters of agents cost no reconcile.

The index says for each node which policies select it, the ruling one first (`decide.selection`). It
is kept up by touching only the nodes or the policy that changed: a label change costs one look at
each policy, a selector change one look at each node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

from kvtier_api.conditions import parse_timestamp

from kvtier_operator.decide.facts import CacheNode, ClusterNode, Policy, StoredRevision
from kvtier_operator.decide.selection import candidates, precedence, selects
from kvtier_operator.observe import objects

__all__ = ["CACHE_NODES", "KINDS", "NODES", "POLICIES", "Key", "Store", "node_key", "policy_key"]

POLICIES: Final = "kvtierpolicies"
CACHE_NODES: Final = "kvtiernodes"
NODES: Final = "nodes"
KINDS: Final = (POLICIES, CACHE_NODES, NODES)
REMEMBERED_DELETIONS: Final = 10_000
"""Of each kind; far more than can be deleted while one request is under way."""

Key = tuple[Literal["policy", "node", "interval"], str]
Raw = Mapping[str, Any]
Fact = Policy | CacheNode | ClusterNode
F = TypeVar("F", Policy, CacheNode, ClusterNode)


def policy_key(name: str) -> Key:
    """Key of a policy: its revisions and its status."""
    return ("policy", name)


def node_key(name: str) -> Key:
    """Key of a node: its KVTierNode."""
    return ("node", name)


@dataclass(slots=True)
class _Kind:
    """Bookkeeping of one kind."""

    raw: dict[str, Raw] = field(default_factory=dict)
    floor: int = -1
    """resourceVersion of the last complete list; -1 before the first."""
    gone: dict[str, None] = field(default_factory=dict)
    """uids of the objects that were deleted last, in order. A uid never comes back, but the answer
    to an own write may arrive after the event that says that the object is gone."""


class Store:
    """``seen``: seen time of the KVTierNode watch; ``wall``: seconds since 1970; ``monotonic``:
    seconds that never jump."""

    def __init__(
        self,
        seen: Callable[[], float],
        wall: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._seen = seen
        self._wall = wall
        self._monotonic = monotonic
        self._kinds = {kind: _Kind() for kind in KINDS}
        self.policies: dict[str, Policy] = {}
        self.cache_nodes: dict[str, CacheNode] = {}
        self.nodes: dict[str, ClusterNode] = {}
        self.revisions: dict[str, dict[str, StoredRevision]] = {}
        """ControllerRevisions by policy name, then by their own; absent before they were read."""
        self.reported_at: dict[str, float] = {}
        """Seen time of each KVTierNode's last report."""
        self.orphan_seen: dict[str, float] = {}
        """Monotonic seconds at which each orphaned KVTierNode was first seen as such."""
        self.candidates: dict[str, tuple[str, ...]] = {}
        """Policies that select a node, the ruling one first; nodes without one are absent."""
        self.selected: dict[str, set[str]] = {}
        """Nodes that a policy selects, whoever rules them."""
        self.held: dict[str, set[str]] = {}
        """Nodes whose KVTierNode names a policy, whether or not it still rules them."""
        self._reporters: set[str] = set()

    @property
    def synced(self) -> bool:
        """Whether every kind has been listed once."""
        return all(kind.floor >= 0 for kind in self._kinds.values())

    def ruling(self, node: str) -> Policy | None:
        """The policy that rules a node."""
        names = self.candidates.get(node)
        return self.policies.get(names[0]) if names else None

    def concerned(self, policy: str) -> list[str]:
        """Nodes that a policy rules, and those whose KVTierNode still names it."""
        return sorted({*self.ruled(policy), *self.held.get(policy, ())})

    def ruled(self, policy: str) -> list[str]:
        """Nodes that a policy rules, by name."""
        return sorted(n for n in self.selected.get(policy, ()) if self.candidates[n][0] == policy)

    def reporting(self) -> int:
        """Nodes that report or will: those that a policy selects and those with a KVTierNode."""
        return len(self._reporters)

    def replace(self, kind: str, raws: Iterable[Raw], version: int) -> set[Key]:
        """A complete list as of ``version``."""
        keys: set[Key] = set()
        listed = set()
        for raw in raws:
            listed.add(raw["metadata"]["name"])
            keys |= self._put(kind, raw)
        held = self._kinds[kind]
        for name, raw in list(held.raw.items()):
            if name not in listed and objects.version_of(raw) <= version:
                self._bury(kind, str(raw["metadata"].get("uid")))
                keys |= self._drop(kind, name)
        held.floor = max(held.floor, version)
        return keys

    def observe(self, kind: str, raw: Raw) -> set[Key]:
        """An object as it was at its resourceVersion."""
        if objects.version_of(raw) <= self._kinds[kind].floor:
            return set()
        return self._put(kind, raw)

    def remove(self, kind: str, raw: Raw) -> set[Key]:
        """An object is gone. Another one of the same name, with another uid, stays."""
        name = raw["metadata"]["name"]
        if raw["metadata"].get("uid"):
            self._bury(kind, raw["metadata"]["uid"])
        held = self._kinds[kind].raw.get(name)
        if held is None or held["metadata"].get("uid") != raw["metadata"].get("uid"):
            return set()
        return self._drop(kind, name)

    def put_revisions(self, policy: str, raws: Iterable[Raw]) -> None:
        """All ControllerRevisions of a policy, as just read."""
        self.revisions[policy] = {r.name: r for r in map(objects.read_revision, raws)}

    def put_revision(self, policy: str, raw: Raw) -> None:
        """One of them, as just written or read."""
        revision = objects.read_revision(raw)
        self.revisions.setdefault(policy, {})[revision.name] = revision

    def drop_revision(self, policy: str, name: str) -> None:
        """One of them is gone."""
        self.revisions.get(policy, {}).pop(name, None)

    # -- one object of each kind

    def _bury(self, kind: str, uid: str) -> None:
        gone = self._kinds[kind].gone
        gone[uid] = None
        if len(gone) > REMEMBERED_DELETIONS:
            del gone[next(iter(gone))]

    def _put(self, kind: str, raw: Raw) -> set[Key]:
        held = self._kinds[kind].raw
        name = raw["metadata"]["name"]
        before = held.get(name)
        if raw["metadata"].get("uid") in self._kinds[kind].gone:
            return set()
        if before is not None and objects.version_of(raw) <= objects.version_of(before):
            return set()
        keys: set[Key] = set()
        if before is not None and before["metadata"].get("uid") != raw["metadata"].get("uid"):
            keys |= self._drop(kind, name)
            before = None
        held[name] = _slim(kind, raw)
        if kind == POLICIES:
            return keys | self._put_policy(objects.read_policy(raw))
        if kind == NODES:
            return keys | self._put_node(objects.read_node(raw))
        fact = self.cache_nodes.get(name)
        known = None if before is None or fact is None else (before, fact)
        return keys | self._put_cache_node(raw, objects.read_cache_node(raw, known), before)

    def _drop(self, kind: str, name: str) -> set[Key]:
        del self._kinds[kind].raw[name]
        if kind == POLICIES:
            del self.policies[name]
            self.revisions.pop(name, None)
            held = {node_key(node) for node in self.held.get(name, ())}
            return self._reselect_policy(name) | {policy_key(name)} | held
        if kind == NODES:
            del self.nodes[name]
        else:
            self._hold(self.cache_nodes.pop(name), None)
            self.reported_at.pop(name, None)
            self.orphan_seen.pop(name, None)
        return self._reselect_node(name) | self._owners(name) | {node_key(name)}

    def _put_policy(self, policy: Policy) -> set[Key]:
        before = self.policies.get(policy.name)
        self.policies[policy.name] = policy
        if before is not None and _same(before, policy):
            return set()
        keys = {policy_key(policy.name)}
        if before is None or _selection_of(before) != _selection_of(policy):
            keys |= self._reselect_policy(policy.name)
        return keys

    def _put_node(self, node: ClusterNode) -> set[Key]:
        before = self.nodes.get(node.name)
        self.nodes[node.name] = node
        if before is not None and _same(before, node):
            return set()
        return self._reselect_node(node.name) | {node_key(node.name)}

    def _put_cache_node(self, raw: Raw, fact: CacheNode, before: Raw | None) -> set[Key]:
        old = self.cache_nodes.get(fact.name)
        self.cache_nodes[fact.name] = fact
        self._hold(old, fact)
        if fact.policy is not None or fact.orphaned_at is None:
            self.orphan_seen.pop(fact.name, None)
        elif fact.name not in self.orphan_seen:
            self.orphan_seen[fact.name] = self._monotonic()
        keys = self._note_report(raw, fact, before)
        if old is not None and _same(old, fact):
            return keys
        if old is None or old.report != fact.report:
            keys |= self._owners(fact.name)
        if old is None or _same(dataclasses.replace(old, report=fact.report), fact) is False:
            keys |= self._reselect_node(fact.name) | {node_key(fact.name)}
        return keys

    def _note_report(self, raw: Raw, fact: CacheNode, before: Raw | None) -> set[Key]:
        """Remember when the agent last reported, in seen time. What is seen for the first time may
        be old: then the agent's own clock says how old; afterwards only ours counts."""
        seen, name = self._seen(), fact.name
        text = objects.last_report_of(raw)
        if before is None:
            written = text or str(raw["metadata"].get("creationTimestamp") or "")
            self.reported_at[name] = seen - _age(written, self._wall())
            return set()
        if text == objects.last_report_of(before):
            return set()
        silent = seen - self.reported_at[name]
        self.reported_at[name] = seen
        was_stale = silent > 3 * max(1, fact.report_interval)
        return self._owners(name) if was_stale else set()

    # -- the indexes

    def _hold(self, old: CacheNode | None, new: CacheNode | None) -> None:
        """A KVTierNode names another policy, or none."""
        before = old.policy.name if old is not None and old.policy is not None else ""
        after = new.policy.name if new is not None and new.policy is not None else ""
        if before == after:
            return
        if before and old is not None:
            self.held[before].discard(old.name)
            if not self.held[before]:
                del self.held[before]
        if after and new is not None:
            self.held.setdefault(after, set()).add(new.name)

    def _owners(self, node: str) -> set[Key]:
        """Policies whose status a node's report is part of."""
        return {policy_key(p) for p in self.candidates.get(node, ())}

    def _reselect_node(self, name: str) -> set[Key]:
        """A node, its labels or its KVTierNode changed."""
        node, cache = self.nodes.get(name), self.cache_nodes.get(name)
        return self._assign(name, candidates(node, cache, self.policies.values()))

    def _reselect_policy(self, name: str) -> set[Key]:
        """A policy came, went, or selects differently."""
        policy = self.policies.get(name)
        had = self.selected.get(name, set())
        if policy is None:
            has: set[str] = set()
        else:
            has = {
                n.name
                for n in self.nodes.values()
                if selects(policy, n, self.cache_nodes.get(n.name))
            }
        keys: set[Key] = set()
        for node in had | has:
            others = [p for p in self.candidates.get(node, ()) if p != name]
            if node in has:
                others.append(name)
            others.sort(key=lambda p: precedence(self.policies[p]))
            keys |= self._assign(node, tuple(others))
        return keys

    def _count(self, node: str) -> None:
        """Whether a node reports, or will: it is selected, or it is there with a KVTierNode."""
        there = node in self.nodes and node in self.cache_nodes
        if there or node in self.candidates:
            self._reporters.add(node)
        else:
            self._reporters.discard(node)

    def _assign(self, node: str, now: tuple[str, ...]) -> set[Key]:
        keys = self._reassign(node, now)
        self._count(node)
        return keys

    def _reassign(self, node: str, now: tuple[str, ...]) -> set[Key]:
        before = self.candidates.get(node, ())
        if before == now:
            return set()
        for policy in set(before) - set(now):
            nodes = self.selected[policy]
            nodes.discard(node)
            if not nodes:
                del self.selected[policy]
        for policy in set(now) - set(before):
            self.selected.setdefault(policy, set()).add(node)
        if now:
            self.candidates[node] = now
        else:
            del self.candidates[node]
        return {node_key(node), *(policy_key(p) for p in (*before, *now))}


def _same(a: F, b: F) -> bool:
    """Equal but for the resourceVersion."""
    return dataclasses.replace(a, version=b.version) == b


def _selection_of(policy: Policy) -> tuple[object, ...]:
    return (policy.uid, policy.selector, policy.deleting, *precedence(policy))


def _slim(kind: str, raw: Raw) -> Raw:
    """What later comparisons need of a raw object: a Node's images and an agent's counters go."""
    meta = raw["metadata"]
    slim: dict[str, Any] = {
        "metadata": {k: meta.get(k) for k in ("name", "uid", "resourceVersion")}
    }
    if kind == CACHE_NODES:
        slim["spec"] = raw.get("spec")
        slim["status"] = {"lastReportTime": objects.last_report_of(raw)}
    return slim


def _age(text: str, wall: float) -> float:
    try:
        return max(0.0, wall - parse_timestamp(text))
    except (ValueError, OverflowError):
        return 0.0
