"""Builders for facts, and a cluster in memory that the real reconciler runs against.

The simulated API server keeps the rules that the operator relies on: resourceVersions that grow,
409 on a stale one, uids, generations that grow with the spec, status that only ``/status`` writes.
Time is a number that tests move.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest
from kvtier_api.conditions import Condition, timestamp
from kvtier_api.policy import NodeSelector
from kvtier_operator.apply.client import Resource
from kvtier_operator.apply.errors import AlreadyExists, NotFound, Stale
from kvtier_operator.decide.facts import AgentReport, CacheNode, ClusterNode, Policy, PolicyRef
from kvtier_operator.metrics import Metrics
from kvtier_operator.observe.freshness import Freshness
from kvtier_operator.observe.objects import read_policy
from kvtier_operator.observe.store import CACHE_NODES, KINDS, NODES, POLICIES, Key, Store
from kvtier_operator.runtime.queue import QueueLimits, QueueState, WorkQueue
from kvtier_operator.runtime.reconciler import Reconciler, Timing
from kvtier_operator.settings import OperatorSettings

START = 1_796_000_000.0
"""Seconds since 1970 at which every simulation starts."""
Raw = dict[str, Any]


def policy_raw(name: str, *, uid: str = "", **spec: Any) -> Raw:
    return {
        "apiVersion": "kvtier.io/v1alpha1",
        "kind": "KVTierPolicy",
        "metadata": {
            "name": name,
            "uid": uid or f"uid-{name}",
            "generation": 1,
            "creationTimestamp": timestamp(START),
            "resourceVersion": "1",
        },
        "spec": {"valueDensity": {"model": "classic"}, **spec},
        "status": {"observedGeneration": -1},
    }


@pytest.fixture
def a_policy() -> Callable[..., Policy]:
    """``a_policy(name, selector={label: value}, spec={..}, **facts)``."""

    def build(
        name: str = "p",
        *,
        selector: Mapping[str, str] | None = None,
        spec: Mapping[str, Any] | None = None,
        **facts: Any,
    ) -> Policy:
        import dataclasses

        parts: dict[str, Any] = dict(spec or {})
        if selector is not None:
            parts["nodeSelector"] = {"matchLabels": dict(selector)}
        return dataclasses.replace(read_policy(policy_raw(name, **parts)), **facts)

    return build


@pytest.fixture
def a_node() -> Callable[..., ClusterNode]:
    """``a_node(name, **labels)``."""
    return lambda name="n", **labels: ClusterNode(name=name, uid=f"uid-{name}", labels=labels)


@pytest.fixture
def a_cache() -> Callable[..., CacheNode]:
    """``a_cache(name, policy, **facts)``: a KVTierNode in step with ``policy``, its agent ready."""

    def build(name: str = "n", policy: Policy | None = None, **facts: Any) -> CacheNode:
        base: dict[str, Any] = {
            "uid": f"ktn-{name}",
            "node_uid": f"uid-{name}",
            "report_interval": 10,
            "orphan_grace": 3600,
        }
        if policy is not None:
            base["policy"] = PolicyRef(policy.name, policy.uid, policy.generation)
            base["stable_revision"] = policy.revision
            base["stable_spec"] = policy.behaviour
            base["report"] = AgentReport(
                observed_generation=1, revision=policy.revision, ready=a_condition("Ready", "True")
            )
        return CacheNode(name=name, **{**base, **facts})

    return build


def a_condition(type_: str, status: str, reason: str = "InForce", message: str = "") -> Condition:
    return Condition(
        type=type_,
        status=status,
        reason=reason,
        message=message,
        last_transition_time=timestamp(START),
    )


@pytest.fixture
def condition() -> Callable[..., Condition]:
    """``condition(type, status, reason, message)``."""
    return a_condition


@pytest.fixture
def selector() -> Callable[..., NodeSelector]:
    """``selector(**labels)``."""
    return lambda **labels: NodeSelector(match_labels=labels)


class FakeApi:
    """Objects of the API server, the writes to it, and the events that it sent."""

    def __init__(self) -> None:
        self.now = START
        self.objects: dict[tuple[str, str], Raw] = {}
        self.writes: list[tuple[str, str, str]] = []
        self.events: list[tuple[str, str, Raw]] = []
        self.version = 100
        self._uids = itertools.count(1)

    # -- what users, kubelets and agents do

    def put_policy(self, name: str, **spec: Any) -> None:
        self._user_put(POLICIES, policy_raw(name, uid=self._uid(), **spec))

    def annotate(self, name: str, annotations: Mapping[str, str]) -> None:
        raw = copy.deepcopy(self.objects[POLICIES, name])
        raw["metadata"]["annotations"] = dict(annotations)
        self._save(POLICIES, raw, "MODIFIED")

    def put_node(self, name: str, **labels: str) -> None:
        meta = {"name": name, "uid": self._uid(), "labels": labels}
        self._user_put(NODES, {"metadata": meta})

    def remove(self, plural: str, name: str) -> None:
        raw = self.objects.pop((plural, name), None)
        if raw is not None:
            self._emit(plural, "DELETED", self._stamp(copy.deepcopy(raw)))

    def report(self, node: str, **status: Any) -> None:
        """The agent of ``node`` reports what it was told as in force, or what ``status`` says."""
        raw = copy.deepcopy(self.objects[CACHE_NODES, node])
        told = raw["spec"].get("stable", {}).get("revision", "")
        ready = a_condition("Ready", "True" if told else "False").to_dict()
        raw["status"] = {
            "observedGeneration": raw["metadata"]["generation"],
            "revision": told,
            "lastReportTime": timestamp(self.now),
            "conditions": [ready],
            **status,
        }
        self._save(CACHE_NODES, raw, "MODIFIED")

    # -- `apply.client.Client`, as far as the executor uses it

    async def apply(
        self,
        resource: Resource,
        name: str,
        content: Mapping[str, Any],
        *,
        subresource: str = "",
        namespace: str = "",
        uid: str = "",
        resource_version: str = "",
    ) -> Raw:
        self.writes.append(("apply", f"{resource.plural}/{subresource}", name))
        held = self.objects.get((resource.plural, name))
        if held is None:
            if subresource:
                raise NotFound(404, "NotFound", name)
            if uid:
                raise Stale(409, "Conflict", "uid mismatch")
            meta = {"name": name, "uid": self._uid(), "generation": 1}
            meta["creationTimestamp"] = timestamp(self.now)
            raw: Raw = {"metadata": meta, **copy.deepcopy(dict(content))}
            return self._save(resource.plural, raw, "ADDED")
        if uid and uid != held["metadata"]["uid"]:
            raise Stale(409, "Conflict", "uid mismatch")
        if resource_version and resource_version != held["metadata"]["resourceVersion"]:
            raise Stale(409, "Conflict", "the object has been modified")
        raw = copy.deepcopy(held)
        raw.update(copy.deepcopy(dict(content)))
        if raw == held:
            return raw
        if "spec" in content:
            raw["metadata"]["generation"] += 1
        return self._save(resource.plural, raw, "MODIFIED")

    async def create(
        self, resource: Resource, content: Mapping[str, Any], *, namespace: str = ""
    ) -> Raw:
        name = content["metadata"]["name"]
        self.writes.append(("create", resource.plural, name))
        if (resource.plural, name) in self.objects:
            raise AlreadyExists(409, "AlreadyExists", name)
        raw = copy.deepcopy(dict(content))
        raw["metadata"]["uid"] = self._uid()
        return self._save(resource.plural, raw, "ADDED")

    async def delete(self, resource: Resource, name: str, *, namespace: str = "", uid: str) -> Raw:
        self.writes.append(("delete", resource.plural, name))
        held = self.objects.get((resource.plural, name))
        if held is None:
            raise NotFound(404, "NotFound", name)
        if held["metadata"]["uid"] != uid:
            raise Stale(409, "Conflict", "uid precondition")
        self.remove(resource.plural, name)
        return {}

    async def get(self, resource: Resource, name: str, *, namespace: str = "") -> Raw:
        return copy.deepcopy(self.objects[resource.plural, name])

    async def list_all(
        self, resource: Resource, *, namespace: str = "", label_selector: str = ""
    ) -> AsyncIterator[Raw]:
        key, _, value = label_selector.partition("=")
        for (plural, _), raw in sorted(self.objects.items()):
            labels = raw["metadata"].get("labels") or {}
            if plural == resource.plural and (not key or labels.get(key) == value):
                yield copy.deepcopy(raw)

    def all_of(self, plural: str) -> dict[str, Raw]:
        return {name: raw for (p, name), raw in self.objects.items() if p == plural}

    def _user_put(self, plural: str, raw: Raw) -> None:
        held = self.objects.get((plural, raw["metadata"]["name"]))
        if held is not None:
            meta = copy.deepcopy(held["metadata"])
            meta["labels"] = raw["metadata"].get("labels") or {}
            if raw.get("spec") != held.get("spec"):
                meta["generation"] += 1
            raw = {**raw, "metadata": meta, "status": copy.deepcopy(held.get("status"))}
        self._save(plural, raw, "ADDED" if held is None else "MODIFIED")

    def _save(self, plural: str, raw: Raw, type_: str) -> Raw:
        self.objects[plural, raw["metadata"]["name"]] = self._stamp(raw)
        self._emit(plural, type_, copy.deepcopy(raw))
        return copy.deepcopy(raw)

    def _stamp(self, raw: Raw) -> Raw:
        self.version += 1
        raw["metadata"]["resourceVersion"] = str(self.version)
        return raw

    def _emit(self, plural: str, type_: str, raw: Raw) -> None:
        if plural in KINDS:
            self.events.append((plural, type_, raw))

    def _uid(self) -> str:
        return f"uid-{next(self._uids)}"


class Process:
    """One life of the operator on a `FakeApi`; a new one is what a kill and restart leave.
    ``skew``: seconds by which its wall clock is wrong."""

    def __init__(
        self, api: FakeApi, settings: OperatorSettings, seed: int = 0, skew: float = 0.0
    ) -> None:
        self.api = api
        self.random = random.Random(seed)
        self.seen_events = len(api.events)
        clock = lambda: api.now  # noqa: E731
        self.wall = lambda: api.now + skew
        self.freshness = Freshness(KINDS, clock)
        self.store = Store(lambda: self.freshness.seen(CACHE_NODES), self.wall, clock)
        self.queue: WorkQueue[Key] = WorkQueue(
            QueueState(
                QueueLimits(rate=1e6, burst=10**6), lambda key: key[0] != "node", lambda: 0.5
            ),
            clock,
        )
        self.reconciler = Reconciler(
            settings,
            api,  # type: ignore[arg-type]
            self.store,
            self.queue,
            self.freshness,
            Metrics(),
            Timing(wall=self.wall, monotonic=clock),
        )
        self.list_all()

    def list_all(self) -> None:
        """As at start and after a lost connection."""
        for kind in KINDS:
            self.freshness.connected(kind)
            raws = [copy.deepcopy(raw) for raw in self.api.all_of(kind).values()]
            self.reconciler.on_list(kind, raws, self.api.version)
        self.seen_events = len(self.api.events)

    def deliver(self, *, shuffled: bool = False) -> None:
        """Events since the last time; ``shuffled``: objects in any order, as kopf's workers may,
        each object's own events in theirs."""
        pending = self.api.events[self.seen_events :]
        self.seen_events = len(self.api.events)
        if shuffled:
            by_uid: dict[str, list[tuple[str, str, Raw]]] = {}
            for event in pending:
                by_uid.setdefault(event[2]["metadata"]["uid"], []).append(event)
            pending = []
            while by_uid:
                uid = self.random.choice(sorted(by_uid))
                pending.append(by_uid[uid].pop(0))
                if not by_uid[uid]:
                    del by_uid[uid]
        for kind, type_, raw in pending:
            self.freshness.heard(kind)
            self.reconciler.on_event(kind, type_, copy.deepcopy(raw))

    async def step(self) -> bool:
        """Reconcile one key that is due; False when there is none."""
        key = self.queue.state.take(self.api.now)
        if key is None:
            return False
        try:
            plan = await self.reconciler.reconcile(key)
        except Stale:
            self.queue.failed(key)
            return True
        self.queue.done(key)
        if plan.look_again_after is not None:
            self.queue.add(key, max(1.0, plan.look_again_after))
        return True

    async def settle(self, seconds: float = 5.0, *, shuffled: bool = False) -> None:
        """Deliver and reconcile until nothing is due for ``seconds``."""
        until = self.api.now + seconds
        while True:
            self.deliver(shuffled=shuffled)
            if await self.step():
                continue
            wait = self.queue.state.next_wakeup(self.api.now)
            if wait is None or self.api.now + wait > until:
                self.api.now = until
                return
            self.api.now += wait

    async def plan_everything(self) -> list[Any]:
        """Actions that a full look at the cluster would take now."""
        found: list[Any] = []
        for name in [*self.store.policies]:
            found += self.reconciler._plan_policy(name).actions
        for name in {*self.store.nodes, *self.store.cache_nodes}:
            found += self.reconciler._plan_node(name).actions
        return found


@pytest.fixture
def api() -> FakeApi:
    """An API server in memory."""
    return FakeApi()


@pytest.fixture
def start(api: FakeApi) -> Callable[..., Process]:
    """``start(**settings)``: a fresh operator process on ``api``."""

    def build(
        *, on: FakeApi | None = None, seed: int = 0, skew: float = 0.0, **settings: Any
    ) -> Process:
        return Process(on or api, OperatorSettings(**settings), seed, skew)

    return build


@pytest.fixture
def new_api() -> Callable[[], FakeApi]:
    """For tests that need several."""
    return FakeApi
