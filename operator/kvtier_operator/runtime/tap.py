"""kopf's HTTP session, listened to.

kopf hands its handlers events, and that is almost enough. Two things it keeps to itself:

- *Bookmarks* and bytes in general. They are the only sign that a quiet watch is alive.
- *The end of a list.* After a lost connection kopf lists again and reports what is there; an object
  that was deleted meanwhile is reported by nobody, and would live on in the store.

Both can be heard on the wire. kopf takes a ready-made session from its login handler, so this one
wraps aiohttp's: a list that comes in complete is handed to ``on_list``, each chunk of a watch is
noted in `Freshness`. Requests are signed here as well, so that a service-account token that was
replaced on disk is used at once, without a 401 first.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import aiohttp
from kubernetes.aio import client as kubernetes_client

from kvtier_operator.apply.connection import AUTH
from kvtier_operator.observe.freshness import Freshness
from kvtier_operator.observe.store import CACHE_NODES, NODES, POLICIES

__all__ = ["TappedSession"]

_PATHS: Final = {
    f"/apis/kvtier.io/v1alpha1/{POLICIES}": POLICIES,
    f"/apis/kvtier.io/v1alpha1/{CACHE_NODES}": CACHE_NODES,
    f"/api/v1/{NODES}": NODES,
}

OnList = Callable[[str, Sequence[Mapping[str, Any]], int], None]


class TappedSession:
    """What kopf uses of an ``aiohttp.ClientSession``. ``on_list(kind, objects, version)``."""

    def __init__(
        self, api: kubernetes_client.ApiClient, freshness: Freshness, on_list: OnList
    ) -> None:
        self._api = api
        self._freshness = freshness
        self._on_list = on_list
        self._partial: dict[str, list[Mapping[str, Any]]] = {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=api.rest_client.ssl_context),
            headers={"User-Agent": "kvtier-operator"},
            trust_env=False,
        )

    @property
    def headers(self) -> Any:
        """Headers of every request."""
        return self._session.headers

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._session.closed

    async def close(self) -> None:
        """Close the pool."""
        await self._session.close()

    async def request(
        self, method: str, url: str, *, headers: Mapping[str, str] | None = None, **options: Any
    ) -> aiohttp.ClientResponse:
        """As aiohttp's, signed and listened to."""
        signed = dict(headers or {})
        await self._api.update_params_for_auth(signed, [], AUTH, url, method, None)
        response = await self._session.request(method, url, headers=signed, **options)
        split = urlsplit(url)
        kind = _PATHS.get(split.path)
        if kind is None or method.upper() != "GET" or response.status != 200:
            return response
        query = parse_qs(split.query)
        if "watch" in query:
            self._freshness.connected(kind)
            # kopf reads the stream through this attribute and no other.
            response.content = _Heard(response.content, kind, self._freshness)  # type: ignore[assignment]
        else:
            await self._listed(kind, "continue" in query, response)
        return response

    async def _listed(self, kind: str, goes_on: bool, response: aiohttp.ClientResponse) -> None:
        # aiohttp keeps the body: kopf's own .json() afterwards does not read the wire again.
        answer = await response.json()
        items = self._partial.pop(kind, []) if goes_on else []
        items.extend(answer.get("items") or ())
        metadata = answer.get("metadata") or {}
        if metadata.get("continue"):
            self._partial[kind] = items
            return
        self._freshness.connected(kind)
        self._on_list(kind, items, int(metadata.get("resourceVersion") or 0))


class _Heard:
    """A body whose chunks are noted as signs of life."""

    def __init__(self, content: aiohttp.StreamReader, kind: str, freshness: Freshness) -> None:
        self._content = content
        self._kind = kind
        self._freshness = freshness

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """As aiohttp's."""
        async for chunk in self._content.iter_chunked(size):
            self._freshness.heard(self._kind)
            yield chunk
        self._freshness.heard(self._kind)  # ended in good order, by the server's own timeout
