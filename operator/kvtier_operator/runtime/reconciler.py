"""The loop: key -> inputs -> plan -> writes -> when to look again.

One dispatcher takes keys from the queue and runs each in a task of its own, at most
`write_concurrency` at once; the queue sees to it that no key runs twice at the same time. Nothing
starts before every kind has been listed once: a half-known cluster would look as if nodes had no
policy.

While the API server cannot be reached the dispatcher stops and asks for its health now and then;
when it is back, whatever failed meanwhile is due at once instead of after its back-off.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier_api.reasons import Reason

from kvtier_operator.apply.client import Client, Resource
from kvtier_operator.apply.errors import ApiError, Forbidden, Stale, Unreachable
from kvtier_operator.apply.executor import Executor
from kvtier_operator.decide.gather import Knobs, gather_node, gather_policy
from kvtier_operator.decide.plan import ApplyNode, ApplyStatus, Plan, StoreRevision
from kvtier_operator.decide.policy import plan_policy
from kvtier_operator.decide.rules.nodes import plan_node
from kvtier_operator.decide.target import report_interval
from kvtier_operator.logs import get_logger
from kvtier_operator.metrics import Metrics
from kvtier_operator.observe.freshness import Freshness
from kvtier_operator.observe.store import CACHE_NODES, POLICIES, Key, Store, node_key
from kvtier_operator.runtime.disputes import Disputes
from kvtier_operator.runtime.queue import WorkQueue
from kvtier_operator.settings import OperatorSettings

__all__ = ["Reconciler", "Timing"]

log = get_logger("reconciler")

INTERVAL: Key = ("interval", "")
PROBE_FIRST_SECONDS = 0.25
PROBE_MAX_SECONDS = 5.0
LEAST_RECHECK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Clocks: ``wall`` seconds since 1970, ``monotonic`` seconds that never jump."""

    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic


class Reconciler:
    """Everything between the store and the API server."""

    def __init__(
        self,
        settings: OperatorSettings,
        client: Client,
        store: Store,
        queue: WorkQueue[Key],
        freshness: Freshness,
        metrics: Metrics,
        timing: Timing | None = None,
    ) -> None:
        self._settings = settings
        self._client = client
        self._executor = Executor(
            client,
            self,
            namespace=settings.namespace,
            instance=socket.gethostname()[:128],
            wall=(timing or Timing()).wall,
        )
        self._store = store
        self._queue = queue
        self._freshness = freshness
        self._metrics = metrics
        self._timing = timing or Timing()
        self._knobs = Knobs(
            orphan_grace_seconds=settings.orphan_grace_seconds,
            history_limit=settings.revision_history_limit,
        )
        self._disputes: Disputes[Key] = Disputes()
        self._forbidden: set[Key] = set()
        self._interval: int | None = None
        self._reporting = -1
        self._revisions_read: dict[str, float] = {}
        self._synced = asyncio.Event()
        self._reachable = asyncio.Event()
        self._reachable.set()

    # -- what the informer tells

    def on_list(self, kind: str, objects: Any, version: int) -> None:
        """A complete list arrived."""
        self._wake(self._store.replace(kind, objects, version))
        if self._store.synced and not self._synced.is_set():
            self._interval = report_interval(self._store.reporting())
            log.info(
                "synced",
                policies=len(self._store.policies),
                nodes=len(self._store.nodes),
                cache_nodes=len(self._store.cache_nodes),
            )
            self._synced.set()

    def on_event(self, kind: str, type_: str | None, raw: Mapping[str, Any]) -> None:
        """One object was listed (None), added, modified or deleted."""
        if type_ == "DELETED":
            self._wake(self._store.remove(kind, raw), gather=kind != POLICIES)
        else:
            self._wake(self._store.observe(kind, raw), gather=kind != POLICIES)

    # -- what own writes were answered (`apply.executor.Memory`)

    def wrote(self, resource: Resource, raw: Mapping[str, Any]) -> None:
        """An object as it is after a write."""
        self._wake(self._store.observe(resource.plural, raw), gather=True)

    def deleted(self, resource: Resource, name: str, uid: str) -> None:
        """That very object is gone."""
        gone = {"metadata": {"name": name, "uid": uid}}
        self._wake(self._store.remove(resource.plural, gone), gather=True)

    def revisions_read(self, policy: str, raws: Sequence[Mapping[str, Any]]) -> None:
        """All ControllerRevisions of a policy."""
        self._store.put_revisions(policy, raws)
        self._revisions_read[policy] = self._timing.monotonic()

    def revision_written(self, policy: str, raw: Mapping[str, Any]) -> None:
        """One of them, created now or found to exist."""
        self._store.put_revision(policy, raw)

    def revision_dropped(self, policy: str, name: str) -> None:
        """One of them is gone."""
        self._store.drop_revision(policy, name)

    def _wake(self, keys: set[Key], *, gather: bool = False) -> None:
        """Queue ``keys``. ``gather``: nodes and their reports come in swarms, and their policies
        wait for more of them."""
        for key in keys:
            delayed = gather and key[0] == "policy"
            self._queue.add(key, self._settings.status_delay_seconds if delayed else 0.0)
        reporting = self._store.reporting()
        if reporting != self._reporting:
            self._reporting = reporting
            if self._interval not in (None, report_interval(reporting)):
                self._queue.add(INTERVAL, self._settings.interval_settle_seconds)

    # -- the loop

    @property
    def synced(self) -> bool:
        """Whether decisions are being made."""
        return self._synced.is_set()

    @property
    def reachable(self) -> bool:
        """Whether the API server answered last time."""
        return self._reachable.is_set()

    @property
    def forbidden(self) -> int:
        """Keys whose last writes were refused for want of rights."""
        return len(self._forbidden)

    async def run(self) -> None:
        """Dispatch until cancelled."""
        await self._synced.wait()
        slots = asyncio.Semaphore(self._settings.write_concurrency)
        async with asyncio.TaskGroup() as tasks:
            while True:
                await slots.acquire()
                if not self._reachable.is_set():
                    await self._wait_for_api()
                key = await self._queue.take()
                task = tasks.create_task(self._serve(key))
                task.add_done_callback(lambda _: slots.release())

    async def _serve(self, key: Key) -> None:
        """Reconcile one key; nothing but cancellation gets out."""
        started = self._timing.monotonic()
        rule, outcome = "none", "ok"
        try:
            plan = await self.reconcile(key)
        except Unreachable as e:
            outcome = "unreachable"
            if self._reachable.is_set():
                self._reachable.clear()
                log.warning("API server cannot be reached", error=str(e))
            self._queue.failed(key)
        except Stale as e:
            outcome = "stale"
            log.debug("object moved on, deciding again", key=key, error=e.message)
            self._queue.failed(key)
        except ApiError as e:
            outcome = "refused"
            delay = self._queue.failed(key, at_least=e.retry_after)
            if isinstance(e, Forbidden):
                self._forbidden.add(key)
            failures = self._queue.state.failures(key)
            if failures & (failures - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...
                log.warning(
                    "API server refused",
                    key=key,
                    code=e.code,
                    error=e.message,
                    failures=failures,
                    retry_in=round(delay, 2),
                )
        except Exception:
            outcome = "failed"
            delay = self._queue.failed(key)
            log.exception("reconcile failed", key=key, retry_in=round(delay, 2))
        else:
            rule = plan.why
            self._queue.done(key)
            self._forbidden.discard(key)
            if plan.look_again_after is not None:
                self._queue.add(key, max(LEAST_RECHECK_SECONDS, plan.look_again_after))
            if plan.actions:
                log.info("reconciled", key=key, rule=rule, actions=[_name(a) for a in plan.actions])
        finally:
            self._metrics.reconciles.labels(key[0], rule, outcome).inc()
            self._metrics.seconds.labels(key[0]).observe(self._timing.monotonic() - started)

    async def reconcile(self, key: Key) -> Plan:
        """Decide and write for one key; raises `apply.errors`. Returns what was done."""
        kind, name = key
        if kind == "interval":
            return self._settle_interval()
        if kind == "node":
            return await self._run(key, self._plan_node(name))
        return await self._reconcile_policy(name)

    def _plan_node(self, name: str) -> Plan:
        interval = self._interval or report_interval(self._store.reporting())
        return plan_node(
            gather_node(
                self._store,
                name,
                report_interval=interval,
                knobs=self._knobs,
                now=self._timing.wall(),
                monotonic=self._timing.monotonic(),
            )
        )

    async def _reconcile_policy(self, name: str) -> Plan:
        policy = self._store.policies.get(name)
        if policy is None:
            self._disputes.forget(("policy", name))
            return Plan("Gone")
        if not policy.hands_off and self._revisions_are_old(name):
            await self._executor.read_revisions(name)
        plan = self._plan_policy(name)
        if any(isinstance(a, StoreRevision) for a in plan.actions):
            # Count what is really there before adding to it.
            await self._executor.read_revisions(name)
            plan = self._plan_policy(name)
        try:
            plan = await self._run(("policy", name), plan)
        finally:
            # Its nodes: whatever changed in the policy, those that need a write get one, also where
            # the status is refused. Without a stored revision none needs any.
            for node in self._store.concerned(name):
                if self._plan_node(node).actions:
                    self._queue.add(node_key(node))
        if any(isinstance(a, StoreRevision) for a in plan.actions):
            self._queue.add(("policy", name), self._settings.status_delay_seconds)
        again = self._settings.resync_seconds
        if plan.look_again_after is not None:
            again = min(again, plan.look_again_after)
        if hold := self._freshness.hold(CACHE_NODES):
            again = min(again, hold)
        if plan.why == Reason.RevisionConflict.value:
            self._revisions_read.pop(name, None)
        return Plan(plan.why, plan.actions, again)

    async def _run(self, key: Key, plan: Plan) -> Plan:
        """Execute a plan, unless what it would write has been undone time and again: then it waits.
        Returns what was done."""
        written = [a for a in plan.actions if isinstance(a, ApplyNode | ApplyStatus)]
        for action in written:
            wait = self._disputes.wait(key, _content(action), self._timing.monotonic())
            if wait:
                return Plan("Disputed", (), wait)
        await self._executor.run(plan)
        if key[0] == "node" and not self._store.cache_nodes.get(key[1]):
            self._disputes.forget(key)
        for action in written:
            if self._disputes.wrote(key, _content(action), self._timing.monotonic()):
                log.warning("somebody undoes what is written; is there a second operator?", key=key)
        return plan

    def _revisions_are_old(self, policy: str) -> bool:
        """They are read, not watched: a watch would need the right to see everybody's."""
        age = self._timing.monotonic() - self._revisions_read.get(policy, float("-inf"))
        return policy not in self._store.revisions or age >= self._settings.resync_seconds

    def _plan_policy(self, name: str) -> Plan:
        inputs = gather_policy(
            self._store,
            name,
            seen=self._freshness.judged(CACHE_NODES),
            knobs=self._knobs,
            now=self._timing.wall(),
        )
        return Plan("Gone") if inputs is None else plan_policy(inputs)

    def _settle_interval(self) -> Plan:
        """The number of nodes has been steady for a while: write the new interval to all."""
        interval = report_interval(self._store.reporting())
        if interval != self._interval:
            log.info("report interval", seconds=interval, nodes=self._store.reporting())
            self._interval = interval
            for name in self._store.cache_nodes:
                self._queue.add(node_key(name))
        return Plan("ReportInterval")

    async def _wait_for_api(self) -> None:
        delay = PROBE_FIRST_SECONDS
        while True:
            try:
                code, _ = await self._client.get_raw("/readyz")
            except Unreachable:
                code = 0
            if code == 200:
                log.info("API server is back")
                self._reachable.set()
                self._queue.hurry()
                return
            await asyncio.sleep(delay)
            delay = min(PROBE_MAX_SECONDS, 2 * delay)


def _content(action: ApplyNode | ApplyStatus) -> Mapping[str, object]:
    return action.spec if isinstance(action, ApplyNode) else action.status


def _name(action: object) -> str:
    return type(action).__name__
