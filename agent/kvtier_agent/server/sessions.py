"""Who is connected: one ``Session`` per client, held alive by its lifeline.

A client is a routing identity on the message socket (it cannot be forged: ZeroMQ assigns it) plus
a lifeline, a plain stream that it opened with the secret of its ``Welcome``. A session whose
lifeline does not come within the grace time, or ends, is over.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvtier_agent.cache.quotas import NOBODY, tenant_number
from kvtier_agent.server.protocol import Hello


@dataclass(eq=False)
class Session:
    """One client of one trust domain."""

    number: int
    identity: bytes
    name: str
    pid: int
    probe: bool
    protocol: int
    since: float
    kv_pool_bytes: int = 0
    rank: int = 0
    tp: int = 1
    """Whose parts of pages it puts and loads: of `rank` among `tp`."""
    tenant: int = NOBODY
    """For whom its pages count (`quotas.tenant_number`)."""
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    lifeline: int | None = None
    """The descriptor of its lifeline; None until it came."""


class Sessions:
    """The clients of one trust domain, by identity, by number and by lifeline."""

    def __init__(self, first_number: int, grace_seconds: float) -> None:
        self._next = first_number
        self._grace = grace_seconds
        self._by_identity: dict[bytes, Session] = {}
        self._by_number: dict[int, Session] = {}
        self._waiting: dict[int, Session] = {}

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_number.values()))

    @property
    def pool_bytes(self) -> int:
        """KV pools of the engines that are here. One without a lifeline may be a try that was given
        up: that engine has said hello again since, and would count twice."""
        return sum(s.kv_pool_bytes for s in self if s.lifeline is not None)

    def open(self, now: float, identity: bytes, hello: Hello, protocol: int) -> Session:
        """A new session for a client that said hello and may come in."""
        session = Session(
            self._next, identity, hello.name, hello.pid, hello.probe, protocol, since=now,
            kv_pool_bytes=hello.kv_pool_bytes, rank=hello.rank,
            tenant=tenant_number(hello.tenant),
            tp=1 if hello.probe else hello.geometry.tp,  # a probe is alone
        )  # fmt: skip
        self._next += 1
        self._by_identity[identity] = session
        self._by_number[session.number] = session
        self._waiting[session.number] = session
        return session

    def of(self, identity: bytes) -> Session | None:
        """The session of a sender, or None for a stranger."""
        return self._by_identity.get(identity)

    def numbered(self, number: int) -> Session | None:
        """The session of a client number."""
        return self._by_number.get(number)

    def take_lifeline(self, number: int, secret: bytes, descriptor: int) -> Session | None:
        """The client proved who it is: ``descriptor`` is its lifeline. None: it is not that one."""
        session = self._waiting.get(number)
        if session is None or not hmac.compare_digest(secret, session.secret):
            return None
        del self._waiting[number]
        session.lifeline = descriptor
        return session

    def close(self, session: Session) -> None:
        """The session is over."""
        self._by_number.pop(session.number, None)
        self._waiting.pop(session.number, None)
        if self._by_identity.get(session.identity) is session:
            del self._by_identity[session.identity]

    def overdue(self, now: float) -> list[Session]:
        """Sessions whose lifeline did not come in time."""
        return [s for s in self._waiting.values() if now - s.since > self._grace]

    def next_due(self) -> float | None:
        """When the next session becomes overdue."""
        if not self._waiting:
            return None
        return min(s.since for s in self._waiting.values()) + self._grace
