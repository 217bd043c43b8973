"""The API server as seen by one agent: three requests on one kind, and what can go wrong with each.

Raw requests through the ApiClient of the ``kubernetes`` package (its asyncio side): it brings
kubeconfig, service-account tokens and TLS; nothing of its generated models is used, for the kind is
ours. One connection pool per process. Every request has a deadline; a watch has one between two
lines as well (`inactivity`), because a silent connection is the failure that nobody reports.

An API error is raised as `ApiError` (status, reason, message). Anything below HTTP (refused, reset,
timed out, TLS) is `Unreachable`: try again later, and say so once.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final

import aiohttp
from kubernetes.aio import client as kubernetes_client
from kubernetes.aio import config as kubernetes_config

from kvtier_agent.node.errors import ConfigurationError

__all__ = ["ApiError", "ConfigurationError", "NodeApi", "Unreachable"]

GROUP: Final = "kvtier.io"
VERSION: Final = "v1alpha1"
COLLECTION: Final = f"/apis/{GROUP}/{VERSION}/kvtiernodes"
FIELD_MANAGER: Final = "kvtier-agent"

REQUEST_TIMEOUT_SECONDS: Final = 10.0
CONNECT_TIMEOUT_SECONDS: Final = 5.0
TOKEN_REREAD_SECONDS: Final = 60.0
"""A projected service-account token is replaced on disk long before it expires."""
MAX_WATCH_LINE_BYTES: Final = 8 << 20
"""Far above what the API server stores in one object (1.5 MiB)."""

TOKEN_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")


class Unreachable(Exception):
    """The API server did not answer: connection, TLS or time."""


class ApiError(Exception):
    """The API server answered with an error."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message

    @classmethod
    def from_status(cls, status: int, body: object) -> ApiError:
        """From a ``Status`` object, or whatever stands in its place."""
        if isinstance(body, Mapping):
            code = body.get("code")
            return cls(
                code if isinstance(code, int) else status,
                str(body.get("reason", "")),
                str(body.get("message", "")),
            )
        return cls(status, "", str(body)[:200])


class NodeApi:
    """KVTierNodes over HTTP. Open and use it on one event loop; close it when done."""

    def __init__(self, configuration: kubernetes_client.Configuration) -> None:
        self._client = kubernetes_client.ApiClient(configuration)
        self._client.user_agent = "kvtier-agent"
        self._host: str = configuration.host

    @classmethod
    async def connect(cls, kubeconfig: Path | None) -> NodeApi:
        """From a kubeconfig, or from the Pod's service account. Makes no request yet.

        Raises `ConfigurationError`."""
        configuration = kubernetes_client.Configuration()
        configuration.retries = None  # the loops above back off themselves
        try:
            if kubeconfig is not None:
                kubeconfig.open().close()  # the package takes a missing file for an empty one
                await kubernetes_config.load_kube_config(
                    config_file=str(kubeconfig), client_configuration=configuration
                )
            else:
                kubernetes_config.load_incluster_config(
                    client_configuration=configuration, try_refresh_token=False
                )
                configuration.refresh_api_key_hook = _token_reader(TOKEN_FILE)
        except Exception as e:  # a file of the user's; the package lets through what parsers raise
            where = f"kubeconfig {kubeconfig}" if kubeconfig else "the Pod's service account"
            hint = "" if kubeconfig else "; outside a Pod give --kubeconfig FILE"
            said = (isinstance(e, OSError) and e.strerror) or " ".join(str(e).split()).rstrip(".")
            raise ConfigurationError(f"cannot use {where}: {said}{hint}") from e
        return cls(configuration)

    @property
    def host(self) -> str:
        return self._host

    async def close(self) -> None:
        await self._client.close()

    async def find(self, name: str) -> tuple[dict[str, Any] | None, str]:
        """The object of that name or None, and the resourceVersion a watch goes on from."""
        query = {"fieldSelector": f"metadata.name={name}"}
        body = await self._request("GET", COLLECTION, query)
        items = body.get("items") or []
        return (items[0] if items else None), str(body["metadata"]["resourceVersion"])

    async def watch(
        self, name: str, resource_version: str, *, server_timeout: int, inactivity: float
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """(type, object) of each event of one object, bookmarks included, until the server ends
        the watch in good order. ``server_timeout`` and ``inactivity`` in seconds.

        Raises `ApiError` for an error event (410: the version is too old, list again), and
        `Unreachable` for silence or a broken connection."""
        query = {
            "fieldSelector": f"metadata.name={name}",
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(server_timeout),
        }
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_TIMEOUT_SECONDS, sock_read=inactivity
        )
        response = await self._open("GET", COLLECTION, query, timeout=timeout)
        try:
            if response.status != 200:
                raise await _error(response)
            async for line in _lines(response):
                event = json.loads(line)
                body = event.get("object") or {}
                if event.get("type") == "ERROR":
                    raise ApiError.from_status(500, body)
                yield str(event.get("type")), body
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as e:
            raise Unreachable(_one_line(e)) from e
        finally:
            response.close()

    async def apply_status(
        self, name: str, status: Mapping[str, Any], resource_version: str | None
    ) -> dict[str, Any]:
        """Server-side apply of ``status``; returns the object as it is now. With a
        ``resource_version`` the write is refused (409) where the object has moved on since."""
        metadata: dict[str, Any] = {"name": name}
        if resource_version is not None:
            metadata["resourceVersion"] = resource_version
        body = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "KVTierNode",
            "metadata": metadata,
            "status": dict(status),
        }
        query = {"fieldManager": FIELD_MANAGER, "force": "true", "fieldValidation": "Strict"}
        return await self._request("PATCH", f"{COLLECTION}/{name}/status", query, body)

    async def _request(
        self, method: str, path: str, query: Mapping[str, str], body: object | None = None
    ) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(
            total=REQUEST_TIMEOUT_SECONDS, sock_connect=CONNECT_TIMEOUT_SECONDS
        )
        response = await self._open(method, path, query, body=body, timeout=timeout)
        try:
            if response.status >= 300:
                raise await _error(response)
            answer: dict[str, Any] = json.loads(await response.read())
            return answer
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as e:
            raise Unreachable(_one_line(e)) from e
        finally:
            response.release()

    async def _open(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        *,
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp's own way to say it
        body: object | None = None,
    ) -> aiohttp.ClientResponse:
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/apply-patch+yaml"
        try:
            method, url, header_params, sent, _ = await self._client.param_serialize(
                method,
                path,
                query_params=list(query.items()),
                header_params=headers,
                body=body,
                auth_settings=["BearerToken"],
            )
            answer = await self._client.call_api(
                method, url, header_params, sent, _request_timeout=timeout
            )
        except (TimeoutError, aiohttp.ClientError, OSError) as e:
            raise Unreachable(_one_line(e)) from e
        response: aiohttp.ClientResponse = answer.response
        return response


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Complete lines of the body. aiohttp's own line iterator is bounded by its read buffer, and
    an object may be larger than that."""
    held = b""
    async for chunk in response.content.iter_any():
        held += chunk
        *lines, held = held.split(b"\n")
        if len(held) > MAX_WATCH_LINE_BYTES:
            raise ValueError(f"a watch event of more than {MAX_WATCH_LINE_BYTES} bytes")
        for line in lines:
            if line.strip():
                yield line


async def _error(response: aiohttp.ClientResponse) -> ApiError:
    text = await response.read()
    try:
        body = json.loads(text)
    except ValueError:
        body = text.decode(errors="replace")
    return ApiError.from_status(response.status, body)


def _token_reader(path: Path) -> Any:
    """A hook that rereads the token file every minute of the monotonic clock (the package's own
    counts wall-clock time, which a clock set back would stop)."""
    reread_at = time.monotonic() + TOKEN_REREAD_SECONDS

    def reread(configuration: kubernetes_client.Configuration) -> None:
        nonlocal reread_at
        now = time.monotonic()
        if now < reread_at:
            return
        reread_at = now + TOKEN_REREAD_SECONDS
        token = path.read_text().strip()
        if token:
            configuration.api_key["BearerToken"] = f"Bearer {token}"

    return reread


def _one_line(e: BaseException) -> str:
    text = " ".join(str(e).split())
    return f"{type(e).__name__}: {text}"[:300] if text else type(e).__name__
