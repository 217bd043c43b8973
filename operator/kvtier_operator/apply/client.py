"""The one client that writes to the API server, by server-side apply.

Raw requests through the ApiClient of the `kubernetes` package. Rules that every write keeps:

- field manager `kvtier-operator`, ``force`` (these fields are ours, whoever touched them) and
  ``fieldValidation=Strict`` (a field that the CRD does not know is an error, not a silent loss);
- a field that somebody else added to an object of ours is beyond an apply, which takes over and
  removes only what it knows; `replace` then writes the section whole, by JSON patch;
- a write that depends on what was read carries the uid and resourceVersion of what was read. On
  the main resource the uid matters: an apply with a resourceVersion alone would *create* an object
  that has been deleted meanwhile;
- status goes to ``/status`` only: there the uid is ignored and a missing object is a 404, so the
  resourceVersion is the fence;
- every answer is either the object or one of `apply.errors`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
from kubernetes.aio import client as kubernetes_client

from kvtier_operator.apply.connection import AUTH
from kvtier_operator.apply.errors import Unreachable, from_response
from kvtier_operator.decide.facts import FIELD_MANAGER

__all__ = [
    "CONTROLLER_REVISIONS",
    "EVENTS",
    "KVTIER_NODES",
    "KVTIER_POLICIES",
    "Client",
    "Resource",
]

Body = Mapping[str, Any] | Sequence[Mapping[str, Any]]
LIST_CHUNK: Final = 500


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind and where it is served."""

    api_version: str
    kind: str
    plural: str

    def path(self, name: str = "", namespace: str = "", subresource: str = "") -> str:
        """Path of the collection or of one object."""
        root = "/apis/" if "/" in self.api_version else "/api/"
        parts = [root + self.api_version]
        if namespace:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        return "/".join([*parts, *(p for p in (name, subresource) if p)])


KVTIER_POLICIES: Final = Resource("kvtier.io/v1alpha1", "KVTierPolicy", "kvtierpolicies")
KVTIER_NODES: Final = Resource("kvtier.io/v1alpha1", "KVTierNode", "kvtiernodes")
CONTROLLER_REVISIONS: Final = Resource("apps/v1", "ControllerRevision", "controllerrevisions")
EVENTS: Final = Resource("events.k8s.io/v1", "Event", "events")


class Client:
    """Requests with a deadline; ``on_write(resource, verb, outcome)`` counts them."""

    def __init__(
        self,
        api: kubernetes_client.ApiClient,
        *,
        request_timeout: float = 10.0,
        connect_timeout: float = 10.0,
        on_write: Callable[[str, str, str], None] = lambda resource, verb, outcome: None,
    ) -> None:
        self._api = api
        self._timeout = aiohttp.ClientTimeout(total=request_timeout, sock_connect=connect_timeout)
        self._on_write = on_write

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
    ) -> dict[str, Any]:
        """Server-side apply of ``content`` (``spec``, ``status``, ...); the object as it now is."""
        metadata: dict[str, Any] = {"name": name, **content.get("metadata", {})}
        if uid:
            metadata["uid"] = uid
        if resource_version:
            metadata["resourceVersion"] = resource_version
        body = {
            "apiVersion": resource.api_version,
            "kind": resource.kind,
            **content,
            "metadata": metadata,
        }
        query = {"fieldManager": FIELD_MANAGER, "force": "true", "fieldValidation": "Strict"}
        path = resource.path(name, namespace, subresource)
        kind = f"{resource.plural}/{subresource}" if subresource else resource.plural
        return await self._write(
            kind, "patch", "PATCH", path, query, body, "application/apply-patch+yaml"
        )

    async def replace(
        self, resource: Resource, name: str, section: str, value: object, *, resource_version: str
    ) -> dict[str, Any]:
        """Make a top-level section exactly ``value``, whoever owns what is in it. Raises `Stale`
        where the object is not at ``resource_version`` any more."""
        patch: list[dict[str, object]] = [
            {"op": "replace", "path": "/metadata/resourceVersion", "value": resource_version},
            {"op": "add", "path": f"/{section}", "value": value},
        ]
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
        content_type = "application/json-patch+json"
        path = resource.path(name)
        return await self._write(
            resource.plural, "patch", "PATCH", path, query, patch, content_type
        )

    async def create(
        self, resource: Resource, content: Mapping[str, Any], *, namespace: str = ""
    ) -> dict[str, Any]:
        """Create; raises `AlreadyExists` where the name is taken."""
        body = {"apiVersion": resource.api_version, "kind": resource.kind, **content}
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
        path = resource.path(namespace=namespace)
        return await self._write(resource.plural, "create", "POST", path, query, body)

    async def delete(
        self, resource: Resource, name: str, *, namespace: str = "", uid: str
    ) -> dict[str, Any]:
        """Delete the very object with that uid; raises `Stale` where another one has its name."""
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid},
            "propagationPolicy": "Background",
        }
        path = resource.path(name, namespace)
        return await self._write(resource.plural, "delete", "DELETE", path, {}, body)

    async def get(self, resource: Resource, name: str, *, namespace: str = "") -> dict[str, Any]:
        """Read one object."""
        return await self._request("GET", resource.path(name, namespace), {}, None)

    async def list_all(
        self, resource: Resource, *, namespace: str = "", label_selector: str = ""
    ) -> AsyncIterator[dict[str, Any]]:
        """All objects, read in chunks from one consistent state."""
        query = {"limit": str(LIST_CHUNK)}
        if label_selector:
            query["labelSelector"] = label_selector
        while True:
            answer = await self._request("GET", resource.path(namespace=namespace), query, None)
            for item in answer.get("items") or ():
                yield item
            token = answer.get("metadata", {}).get("continue")
            if not token:
                return
            query["continue"] = token

    async def get_raw(self, path: str) -> tuple[int, str]:
        """(HTTP status, text) of any path, such as ``/readyz``. Raises `Unreachable` only."""
        code, text, _ = await self._exchange("GET", path, {}, None, "application/json")
        return code, text

    async def close(self) -> None:
        """Close the pool."""
        await self._api.close()

    async def _write(
        self,
        kind: str,
        verb: str,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Body,
        content_type: str = "application/json",
    ) -> dict[str, Any]:
        outcome = "error"
        try:
            answer = await self._request(method, path, query, body, content_type)
            outcome = "ok"
            return answer
        finally:
            self._on_write(kind, verb, outcome)

    async def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Body | None,
        content_type: str = "application/json",
    ) -> dict[str, Any]:
        code, text, headers = await self._exchange(method, path, query, body, content_type)
        try:
            answer = json.loads(text) if text else {}
        except ValueError:
            answer = {"message": text[:200]}
        if not isinstance(answer, dict):
            answer = {"message": text[:200]}
        if code >= 300:
            raise from_response(code, answer, headers)
        return answer

    async def _exchange(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Body | None,
        content_type: str,
    ) -> tuple[int, str, Mapping[str, str]]:
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = content_type
        try:
            method, url, header_params, sent, _ = await self._api.param_serialize(
                method,
                path,
                query_params=list(query.items()),
                header_params=headers,
                body=body,
                auth_settings=AUTH,
            )
            answer = await self._api.call_api(
                method, url, header_params, sent, _request_timeout=self._timeout
            )
            text = await answer.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as e:
            reason = " ".join(str(e).split())
            raise Unreachable(f"{type(e).__name__}: {reason}" if reason else "timed out") from e
        return answer.status, text.decode("utf-8", "replace"), answer.headers
