"""Status out: the newest status of this node, written as seldom as its readers can bear.

`Reporter` runs beside the watch on one event loop. It is told of the object as the watch saw it
(`saw`) and asks ``build`` for the status to write: a function of the object's present status (whose
conditions keep their transition times) that returns a plain dict. `cadence` says when.

Every write is fenced by the resourceVersion last seen: the status answers a spec that was read. A
409 is settled by reading again; no object means nothing to write to: the operator makes the
objects, never an agent. A second agent under the same name is noticed (`rival`), and each says so.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from kvtier_agent.node import backoff, cadence
from kvtier_agent.node.kube import ApiError, NodeApi, Unreachable
from kvtier_agent.node.rival import Rival
from kvtier_agent.node.watch import Sighting

__all__ = ["Build", "Reporter"]

Build = Callable[[Mapping[str, Any]], dict[str, Any] | None]
"""(the object's present status) -> the status to write, or None while there is nothing to say."""

LONGEST_NAP_SECONDS = 1.0
"""The state is looked at this often for something urgent; looking costs no request."""

log = structlog.get_logger(__name__)


class Reporter:
    """Runs on one event loop. ``interval``: seconds between two reports, read anew each time."""

    def __init__(
        self,
        api: NodeApi,
        name: str,
        build: Build,
        interval: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._name = name
        self._build = build
        self._interval = interval
        self._clock = clock
        self._body: dict[str, Any] | None = None
        self._cadence = cadence.Cadence()
        self._failures = 0
        self._random = random.Random()  # noqa: S311 - jitter
        self._wake = asyncio.Event()
        self._boot_id = ""
        self._rival = Rival()
        self._said_rival = ""
        self.writes = 0
        """Status writes that the API server took."""

    def saw(self, sighting: Sighting) -> None:
        """The watch saw the object. Call on the event loop's thread."""
        if self._body is None or sighting.body is None:
            # A new object knows nothing of what was written to the one before it.
            self._cadence = cadence.Cadence(not_before=self._cadence.not_before)
        self._body = sighting.body
        theirs = str(_status(self._body).get("bootID") or "")
        self._rival = self._rival.saw(self._boot_id, theirs, self._interval(), self._clock())
        self._wake.set()

    @property
    def rival(self) -> str:
        """Boot id of another agent that reports under this name; empty while there is none."""
        return self._rival.present(self._interval(), self._clock())

    def _say_rival(self) -> None:
        rival = self.rival
        if rival and not self._said_rival:
            log.warning(
                "another agent reports for this node; run one agent under one --node-name",
                node=self._name,
                its_boot_id=rival,
            )
        elif self._said_rival and not rival:
            log.info("no other agent reports for this node any more", node=self._name)
        self._said_rival = rival

    def wake(self) -> None:
        """Something urgent may have changed. Call on the event loop's thread."""
        self._wake.set()

    async def run(self) -> None:
        """Never returns; cancel it."""
        while True:
            wait = await self.turn(self._clock())
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), min(LONGEST_NAP_SECONDS, max(0.02, wait)))
            except TimeoutError:
                continue

    async def turn(self, now: float) -> float:
        """Writes if it is time; returns the seconds until the next write is due."""
        self._say_rival()
        if self._body is None:
            return LONGEST_NAP_SECONDS
        status = self._build(_status(self._body))
        if status is None:
            return LONGEST_NAP_SECONDS
        urgent = cadence.urgent_part(status)
        wait = cadence.next_write(self._cadence, urgent, self._interval(), now)
        if wait > 0:
            return wait
        await self._write(status, urgent)
        return cadence.SHORTEST_SECONDS

    async def last_word(self) -> None:
        """One last write, whatever the cadence says; its failure is nobody's concern any more."""
        status = self._build(_status(self._body)) if self._body else None
        if status is not None:
            await self._write(status, cadence.urgent_part(status))

    async def _write(self, status: Mapping[str, Any], urgent: object) -> None:
        assert self._body is not None
        version = self._body["metadata"]["resourceVersion"]
        try:
            self._body = await self._api.apply_status(self._name, status, version)
        except ApiError as e:
            if e.status == 409 and self._failures == 0:
                await self._read_again()
                self._cadence = self._cadence.failed(self._clock(), 0.0)
                self._failures = 1
                return
            if e.status == 404:
                self._body = None
            self._failed(str(e))
        except Unreachable as e:
            self._failed(str(e))
        else:
            self.writes += 1
            self._boot_id = str(status.get("bootID") or "")
            self._rival = self._rival.wrote()
            if self._failures > 1:
                log.info("status is written again", failures=self._failures)
            self._failures = 0
            self._cadence = self._cadence.wrote(urgent, self._clock())

    async def _read_again(self) -> None:
        try:
            self._body, _ = await self._api.find(self._name)
        except (ApiError, Unreachable) as e:
            log.debug("cannot read the node object", error=str(e))

    def _failed(self, error: str) -> None:
        self._failures += 1
        if self._failures <= 2:
            log.warning("status not written; trying again", error=error)
        wait = backoff.delay(self._failures, self._random.random())
        self._cadence = self._cadence.failed(self._clock(), wait)


def _status(body: Mapping[str, Any] | None) -> Mapping[str, Any]:
    status = (body or {}).get("status")
    return status if isinstance(status, Mapping) else {}
