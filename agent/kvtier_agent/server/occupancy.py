"""Whose model a trust domain is for: one geometry at a time, and how it passes to another one."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.server import arguments
from kvtier_agent.server import protocol as p
from kvtier_agent.server.sessions import Session, Sessions
from kvtier_agent.storage.core import Core, CoreError

log = structlog.get_logger("kvtier.server")


class RefusedRequestError(Exception):
    """Answer with ``Refused``; ``code`` is one of ``protocol.Code``."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Occupancy:
    """``geometry``: of the clients there are, None before the first."""

    def __init__(
        self,
        name: str,
        core: Core,
        sessions: Sessions,
        grace_seconds: float,
        over: Callable[[float, Session], None],
    ) -> None:
        """``grace_seconds``: how long the engines of a model may be gone before another one's get
        the domain; ``over``: ends a session."""
        self.geometry: Geometry | None = None
        self._name = name
        self._core = core
        self._sessions = sessions
        self._grace_seconds = grace_seconds
        self._over = over
        self._engine_left = float("-inf")
        self._expected: Geometry | None = None
        """Of the pages on the volumes, until the first engine has come."""

    def expect(self, now: float, left: Geometry | None) -> None:
        """The sockets open. The engines of an earlier agent get the same time to come back as
        those that leave this one; ``left``: the geometry of its pages on the volumes, None where
        there are none (in memory the cache knows)."""
        self._engine_left = now
        self._expected = left

    def left(self, now: float, session: Session) -> None:
        """A client is gone."""
        if not session.probe:
            self._engine_left = now

    def admit(self, now: float, hello: p.Hello) -> None:
        """A client says hello: its geometry is the domain's, or it is refused
        (``RefusedRequestError``)."""
        try:
            geometry = _geometry(hello)
            if not 0 <= hello.rank < geometry.tp:
                raise RefusedRequestError(
                    p.Code.GEOMETRY,
                    f"rank {hello.rank} of a group of {geometry.tp}; write a rank from 0 to"
                    f" {geometry.tp - 1}",
                )
            self._wait_for_the_expected(now, hello, geometry)
            answer = self._core.register(now, geometry)
        except CoreError as error:
            raise RefusedRequestError(p.Code.NOT_READY, str(error)) from None
        if not answer.accepted:
            self._take_over(now, hello, geometry, answer.reason)
        self.geometry = self.geometry or geometry
        self._expected = None

    def _wait_for_the_expected(self, now: float, hello: p.Hello, geometry: Geometry) -> None:
        """Refuses the engine of another model while pages on the volumes wait for theirs."""
        expected = self._expected
        if expected is None or expected == geometry or self._core.cache.shaped:
            return
        left = self._grace_seconds - (now - self._engine_left)
        if left > 0 or hello.probe:
            raise RefusedRequestError(
                p.Code.GEOMETRY,
                f"the volumes hold pages of another model or layout ({expected.page_bytes} bytes,"
                f" {expected.page_tokens} tokens a page), whose engines may come back; use another"
                f" trust domain, or wait {max(1.0, left):.0f} s",
            )

    def _take_over(self, now: float, hello: p.Hello, geometry: Geometry, reason: str) -> None:
        """Another model's engine: it gets the domain when those of the model before are gone."""
        left = self._grace_seconds - (now - self._engine_left)
        if hello.probe or any(not session.probe for session in self._sessions):
            raise RefusedRequestError(p.Code.GEOMETRY, reason)
        if left > 0:
            raise RefusedRequestError(
                p.Code.GEOMETRY, f"{reason}, or wait {left:.0f} s: its engines have left"
            )
        for session in self._sessions:  # probes, of the old geometry
            self._over(now, session)
        self.geometry = None
        try:
            self._core.reshape(now, geometry)
        except CoreError as error:
            raise RefusedRequestError(p.Code.NOT_READY, str(error)) from None
        log.info(
            "another model has the trust domain; its tiers start cold", domain=self._name,
            page_bytes=geometry.page_bytes, page_tokens=geometry.page_tokens,
        )  # fmt: skip


def _geometry(hello: p.Hello) -> Geometry:
    """Of a hello; refused where it makes no sense, or where a ``Client`` could not say it: the
    readiness probe is one, and has to."""
    try:
        return arguments.geometry_names(hello.geometry.geometry())
    except ValueError as error:
        raise RefusedRequestError(p.Code.GEOMETRY, str(error)) from None
