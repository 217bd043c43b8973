"""The watch on the agent's own KVTierNode: the newest object in, for as long as the process lives.

The loop, as every informer has it: list (one object, by field selector), then watch from that
version. What ends a watch, and what follows:

- the server's own timeout: watch again from the last version seen, bookmarks included;
- silence for `INACTIVITY_SECONDS`, though bookmarks come every minute: the connection is dead
  without knowing it; watch again;
- 410, or any other error in the stream or at its start: forget the version and list anew, after
  a jittered pause that grows with failures in a row;
- no answer at all: the same pause, and the version is kept.

Nothing here stops the cache from serving: what was heard last stays in force meanwhile. A failure
is logged when it begins and when it is over, not each time.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import structlog

from kvtier_agent.node import backoff
from kvtier_agent.node.kube import ApiError, NodeApi, Unreachable

__all__ = ["NodeWatch", "Sighting"]

INACTIVITY_SECONDS: Final = 70.0
SERVER_TIMEOUT_SECONDS: Final = 300
SHORTEST_WATCH_SECONDS: Final = 1.0
"""A server that ends each watch at once is not asked more often than this."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Sighting:
    """The object as it was last seen; ``body`` None: there is none of that name."""

    body: dict[str, Any] | None
    resource_version: str


class NodeWatch:
    """Runs the loop and hands each `Sighting` to ``publish`` (called on the event loop's thread;
    it must not block). ``beat`` is called at least every few seconds while the loop lives."""

    def __init__(
        self,
        api: NodeApi,
        name: str,
        publish: Callable[[Sighting], None],
        *,
        inactivity: float = INACTIVITY_SECONDS,
        server_timeout: int = SERVER_TIMEOUT_SECONDS,
    ) -> None:
        self._api = api
        self._name = name
        self._publish = publish
        self._inactivity = inactivity
        self._server_timeout = server_timeout
        self._random = random.Random()  # noqa: S311 - jitter
        self._failures = 0
        self.heard_at: float | None = None
        """Monotonic seconds of the last list, event or bookmark; None before the first."""

    async def run(self) -> None:
        """Never returns; cancel it."""
        version: str | None = None
        while True:
            started = time.monotonic()
            try:
                if version is None:
                    version = await self._list()
                version = await self._follow(version)
            except ApiError as e:
                version = None
                # A version that is too old is ordinary life, not a failure.
                await self._failed(str(e), quiet=e.status == 410)
            except _Broken as e:
                version = e.version
                await self._failed(str(e))
            except Unreachable as e:
                await self._failed(str(e))
            else:
                await asyncio.sleep(max(0.0, started + SHORTEST_WATCH_SECONDS - time.monotonic()))

    async def _list(self) -> str:
        body, version = await self._api.find(self._name)
        self._heard()
        self._publish(Sighting(body, version))
        return version

    async def _follow(self, version: str) -> str:
        """Watches until the server ends it; returns the version to go on from."""
        spread = self._random.randrange(1 + self._server_timeout // 5)
        events = self._api.watch(
            self._name,
            version,
            server_timeout=self._server_timeout + spread,
            inactivity=self._inactivity,
        )
        try:
            async for kind, body in events:
                self._heard()
                version = str(body.get("metadata", {}).get("resourceVersion") or version)
                if kind in ("ADDED", "MODIFIED"):
                    self._publish(Sighting(body, version))
                elif kind == "DELETED":
                    self._publish(Sighting(None, version))
        except Unreachable as e:
            raise _Broken(version, str(e)) from e
        return version

    def _heard(self) -> None:
        self.heard_at = time.monotonic()
        if self._failures:
            log.info("api server answers again", failures=self._failures, host=self._api.host)
        self._failures = 0

    async def _failed(self, error: str, *, quiet: bool = False) -> None:
        self._failures += 1
        if self._failures == 1 and not quiet:
            log.warning(
                "no word from the api server; what was heard last stays in force",
                error=error,
                host=self._api.host,
            )
        await asyncio.sleep(backoff.delay(self._failures, self._random.random()))


class _Broken(Exception):
    """A watch that broke off after ``version`` was seen."""

    def __init__(self, version: str, message: str) -> None:
        super().__init__(message)
        self.version = version
