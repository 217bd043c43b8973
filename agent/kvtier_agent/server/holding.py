"""Requests of clients that keep pages, or want them gone: pin, unpin, delete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvtier_agent.cache.cache import Cache
from kvtier_agent.cache.parts import all_parts, whole_deleted
from kvtier_agent.server import protocol as p
from kvtier_agent.server.occupancy import RefusedRequestError
from kvtier_agent.server.sessions import Session

Handler = Callable[[float, Session, Any, Sequence[Any]], None]


class Reply(Protocol):
    def __call__(self, identity: bytes, reply: p.Reply, *buffers: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class Holding:
    """A part of ``Dispatcher``, made of its own means."""

    cache: Callable[[], Cache]
    keys: Callable[[Sequence[Any], int], Any]
    mine: Callable[[Session, Sequence[Any], int], Any]
    fence: Callable[[int], None]
    reply: Reply
    max_keys: int

    def handlers(self) -> dict[type, Handler]:
        """What each kind of request is answered by."""
        return {p.Pin: self._pin, p.Unpin: self._unpin, p.Delete: self._delete}

    def _pin(self, now: float, session: Session, request: p.Pin, frames: Sequence[Any]) -> None:
        self.fence(request.boot)
        result = self.cache().pin(now, session.number, self.mine(session, frames, 1))
        self.reply(
            session.identity, p.Pinned(request.id), result.status.tobytes(), result.tier.tobytes()
        )

    def _unpin(self, now: float, session: Session, request: p.Unpin, frames: Sequence[Any]) -> None:
        self.fence(request.boot)
        self.cache().unpin(now, session.number, self.mine(session, frames, 1))

    def _delete(
        self, now: float, session: Session, request: p.Delete, frames: Sequence[Any]
    ) -> None:
        self.fence(request.boot)
        keys = self.keys(frames, 1)
        if len(keys) * session.tp > self.max_keys:
            raise RefusedRequestError(
                p.Code.TOO_MANY_KEYS,
                f"{len(keys)} pages of {session.tp} parts in one call; name at most"
                f" {self.max_keys // session.tp}",
            )
        parts = all_parts(keys, session.tp)
        status = whole_deleted(self.cache().delete(now, parts), session.tp)
        self.reply(session.identity, p.Deleted(request.id), status.tobytes())
