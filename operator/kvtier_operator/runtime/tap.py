"""kopf's HTTP session, listened to.

kopf hands its handlers events, and that is almost enough. Two things it keeps to itself:

- *Bookmarks* and bytes in general. They are the only sign that a quiet watch is alive.
- *The end of a list.* After a lost connection kopf lists again and reports what is there; an object
  that was deleted meanwhile is reported by nobody, and would live on in the store.

Both can be heard on the wire. kopf takes a ready-made session from its login handler, so this one
wraps aiohttp's: a list that comes in complete is handed to ``on_list``, each chunk of a watch is
noted in `Freshness`. Requests are signed here as well, so that a service-account token that was
replaced on disk is used at once, without a 401 first.

What waiting can change is waited for here, and kopf hears nothing of it: an API server that is away
or overloaded, credentials that are refused, a right that is missing. Left to itself kopf logs each
attempt, logs in anew without end after a 401, and gives a watch up for good after nine attempts.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import aiohttp
from kubernetes.aio import client as kubernetes_client

from kvtier_operator.apply.connection import AUTH
from kvtier_operator.observe.freshness import Freshness
from kvtier_operator.observe.store import CACHE_NODES, NODES, POLICIES
from kvtier_operator.runtime.obstacles import Obstacle, Obstacles, obstacle_of

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
        self,
        api: kubernetes_client.ApiClient,
        freshness: Freshness,
        obstacles: Obstacles,
        on_list: OnList,
    ) -> None:
        self._api = api
        self._freshness = freshness
        self._obstacles = obstacles
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
        """As aiohttp's, signed and listened to. Returns when the API server has granted it, or
        answers what no waiting changes."""
        split = urlsplit(url)
        query = parse_qs(split.query)
        kind = _PATHS.get(split.path) if method.upper() == "GET" else None
        what = f"{'watch' if 'watch' in query else 'list'} {kind}" if kind else f"read {split.path}"
        response = await self._granted(what, method, url, headers or {}, options)
        if response.status != 200:
            if kind is not None:
                message = str((await _status(response)).get("message") or response.reason or "")
                self._obstacles.ended(what, response.status, message)
            return response
        if kind is None:
            return response
        if "watch" in query:
            self._freshness.connected(kind)
            # kopf reads the stream through this attribute and no other.
            response.content = _Heard(response.content, kind, self._freshness)  # type: ignore[assignment]
        else:
            await self._listed(kind, "continue" in query, response)
        return response

    async def _granted(
        self,
        what: str,
        method: str,
        url: str,
        headers: Mapping[str, str],
        options: Mapping[str, Any],
    ) -> aiohttp.ClientResponse:
        """Ask until nothing that passes is in the way."""
        while True:
            signed = dict(headers)
            await self._api.update_params_for_auth(signed, [], AUTH, url, method, None)
            obstacle: Obstacle | None
            try:
                response = await self._session.request(method, url, headers=signed, **options)
                obstacle = None
                if response.status >= 400:
                    body = await _status(response)
                    obstacle = obstacle_of(what, response.status, body, response.headers)
            except (TimeoutError, aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as e:
                if self.closed:
                    raise
                reason = " ".join(str(e).split()) or type(e).__name__
                obstacle = Obstacle(f"the API server cannot be reached: {reason}")
            if obstacle is None:
                self._obstacles.granted(what)
                return response
            await asyncio.sleep(self._obstacles.met(what, obstacle))

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


async def _status(response: aiohttp.ClientResponse) -> Mapping[str, Any]:
    """The Status object of a refusal, or what it said as plain text. aiohttp keeps the body, so
    that kopf can read it once more."""
    text = await response.text(errors="replace")
    try:
        body = json.loads(text)
    except ValueError:
        return {"message": text.strip()[:200]}
    return body if isinstance(body, Mapping) else {}
