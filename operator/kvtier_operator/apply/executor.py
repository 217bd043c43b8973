"""Plans -> writes. What comes back goes into the store, so that nothing is planned twice.

Idempotent answers are successes: deleting what is gone, creating what exists with the same
content. An event that the API server refuses is given up: a status that says how things stand must
not wait for it. Everything else is raised as `apply.errors` and is the work queue's business.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

from kvtier_operator.apply.client import (
    CONTROLLER_REVISIONS,
    EVENTS,
    KVTIER_NODES,
    KVTIER_POLICIES,
    Client,
    Resource,
)
from kvtier_operator.apply.errors import AlreadyExists, ApiError, NotFound
from kvtier_operator.decide.facts import GENERATION_ANNOTATION, POLICY_LABEL
from kvtier_operator.decide.plan import (
    Action,
    ApplyNode,
    ApplyStatus,
    DeleteNode,
    DropRevision,
    EmitEvent,
    Plan,
    StoreRevision,
)
from kvtier_operator.logs import get_logger

__all__ = ["Executor", "Memory"]

log = get_logger("executor")

EVENT_NAMESPACE = "default"
"""Where events about cluster-scoped objects live."""
API_VERSION = "kvtier.io/v1alpha1"


class Memory(Protocol):
    """Who remembers what the API server answered."""

    def wrote(self, resource: Resource, raw: Mapping[str, Any]) -> None:
        """An object as it is after a write."""

    def deleted(self, resource: Resource, name: str, uid: str) -> None:
        """That very object is gone."""

    def revisions_read(self, policy: str, raws: Sequence[Mapping[str, Any]]) -> None:
        """All ControllerRevisions of a policy."""

    def revision_written(self, policy: str, raw: Mapping[str, Any]) -> None:
        """One of them, created now or found to exist."""

    def revision_dropped(self, policy: str, name: str) -> None:
        """One of them is gone."""


class Executor:
    """``wall``: seconds since 1970, for events."""

    def __init__(
        self,
        client: Client,
        memory: Memory,
        *,
        namespace: str,
        instance: str,
        wall: Callable[[], float],
    ) -> None:
        self._client = client
        self._memory = memory
        self._namespace = namespace
        self._instance = instance
        self._wall = wall

    async def run(self, plan: Plan) -> None:
        """Execute the actions in order; the first error stops and is raised."""
        for action in plan.actions:
            await self._one(action)

    async def read_revisions(self, policy: str) -> None:
        """Read a policy's ControllerRevisions afresh."""
        found = [
            raw
            async for raw in self._client.list_all(
                CONTROLLER_REVISIONS,
                namespace=self._namespace,
                label_selector=f"{POLICY_LABEL}={policy}",
            )
        ]
        self._memory.revisions_read(policy, found)

    async def _one(self, action: Action) -> None:
        match action:
            case ApplyNode():
                await self._apply_node(action)
            case DeleteNode():
                await self._delete_node(action)
            case StoreRevision():
                await self._store_revision(action)
            case DropRevision():
                await self._drop_revision(action)
            case EmitEvent():
                await self._emit(action)
            case ApplyStatus():
                await self._apply_status(action)

    async def _apply_node(self, action: ApplyNode) -> None:
        if action.whole:
            answer = await self._client.replace(
                KVTIER_NODES,
                action.name,
                "spec",
                action.spec,
                resource_version=str(action.version),
            )
        else:
            answer = await self._client.apply(
                KVTIER_NODES,
                action.name,
                {"spec": action.spec},
                uid=action.uid,
                resource_version=str(action.version) if action.uid else "",
            )
        self._memory.wrote(KVTIER_NODES, answer)

    async def _delete_node(self, action: DeleteNode) -> None:
        answer: Mapping[str, Any] = {}
        with contextlib.suppress(NotFound):
            answer = await self._client.delete(KVTIER_NODES, action.name, uid=action.uid)
        if answer.get("kind") == KVTIER_NODES.kind:
            self._memory.wrote(KVTIER_NODES, answer)  # somebody's finalizer still holds it
        else:
            self._memory.deleted(KVTIER_NODES, action.name, action.uid)

    async def _apply_status(self, action: ApplyStatus) -> None:
        try:
            answer = await self._client.apply(
                KVTIER_POLICIES,
                action.policy,
                {"status": action.status},
                subresource="status",
                resource_version=str(action.version),
            )
        except NotFound:
            return  # deleted meanwhile; its event is on the way
        self._memory.wrote(KVTIER_POLICIES, answer)

    async def _store_revision(self, action: StoreRevision) -> None:
        owner = {
            "apiVersion": API_VERSION,
            "kind": "KVTierPolicy",
            "name": action.policy,
            "uid": action.policy_uid,
            "controller": True,
            "blockOwnerDeletion": False,
        }
        body: dict[str, Any] = {
            "metadata": {
                "name": action.name,
                "namespace": self._namespace,
                "labels": {POLICY_LABEL: action.policy},
                "annotations": {GENERATION_ANNOTATION: str(action.generation)},
                "ownerReferences": [owner],
            },
            "data": action.behaviour,
            "revision": action.number,
        }
        try:
            raw: Mapping[str, Any] = await self._client.create(
                CONTROLLER_REVISIONS, body, namespace=self._namespace
            )
        except AlreadyExists:
            # Written by this operator before it was killed, or by another one. The next plan
            # compares content and owner.
            raw = await self._client.get(
                CONTROLLER_REVISIONS, action.name, namespace=self._namespace
            )
        self._memory.revision_written(action.policy, raw)

    async def _drop_revision(self, action: DropRevision) -> None:
        with contextlib.suppress(NotFound):
            await self._client.delete(
                CONTROLLER_REVISIONS, action.name, namespace=self._namespace, uid=action.uid
            )
        self._memory.revision_dropped(action.policy, action.name)

    async def _emit(self, action: EmitEvent) -> None:
        now = datetime.fromtimestamp(self._wall(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        body = {
            "metadata": {"name": action.name, "namespace": EVENT_NAMESPACE},
            "eventTime": now,
            "type": "Warning" if action.warning else "Normal",
            "reason": action.reason.value,
            "note": action.note,
            "action": "Reconcile",
            "reportingController": "kvtier.io/operator",
            "reportingInstance": self._instance,
            "regarding": {
                "apiVersion": API_VERSION,
                "kind": "KVTierPolicy",
                "name": action.policy,
                "uid": action.policy_uid,
            },
        }
        try:
            await self._client.create(EVENTS, body, namespace=EVENT_NAMESPACE)
        except AlreadyExists:
            pass  # told before
        except ApiError as e:
            log.warning("event refused", event_name=action.name, code=e.code, error=e.message)
