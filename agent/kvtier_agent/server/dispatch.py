"""One message in, one call of the cache, one reply out: the rules of one trust domain's socket.

Runs on the cache thread. Nothing a client sends ends the agent: what does not decode, is too
large, names an unknown client or another boot is answered with ``Refused`` and counted, and so is
an error of our own (``internal``). A load whose pages come from NVMe is parked under its lease and
answered when its ticket is finished; nobody else waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import structlog

from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.identity import KEY_BYTES, NO_PARENT
from kvtier_agent.cache.parts import part_key, part_keys
from kvtier_agent.cache.results import MISS, PutStatus, Ticket
from kvtier_agent.server import protocol as p
from kvtier_agent.server.accounting import Accounts
from kvtier_agent.server.holding import Holding
from kvtier_agent.server.layered import LayeredLoads
from kvtier_agent.server.occupancy import Occupancy, RefusedRequestError
from kvtier_agent.server.sessions import Session, Sessions
from kvtier_agent.server.settings import ServerSettings, TrustDomain
from kvtier_agent.server.tracing import Tracing
from kvtier_agent.server.versions import spoken_with

log = structlog.get_logger("kvtier.server")

Frames = Sequence[Any]
Send = Callable[[bytes, list[Any]], None]
_NO_BYTES: Final = b""
MOST_PROBES: Final = 4
QUIET_SECONDS: Final = 10.0
"""Refusals of one code are logged at most this often."""


class Dispatcher:
    """See the module's story."""

    def __init__(
        self,
        domain: TrustDomain,
        settings: ServerSettings,
        boot: int,
        sessions: Sessions,
        send: Send,
        statistics: Callable[[], dict[str, Any]],
        tracing: Tracing,
        version: str = "",
    ) -> None:
        """``send``: puts a reply on the wire; ``statistics``: the values of a ``Statistics``."""
        self.sessions = sessions
        self.accounts = Accounts(settings.lease_seconds)
        self.refused: Counter[str] = Counter()
        self.messages = 0
        self._core = domain.core
        self._name = domain.name
        self._settings = settings
        self._boot = boot
        self._send = send
        self._statistics = statistics
        self._tracing = tracing
        self._version = version
        self._occupancy = Occupancy(
            domain.name, domain.core, sessions, settings.geometry_grace_seconds, self.over
        )
        self._parked: dict[int, tuple[Session, p.Load]] = {}
        self._said: dict[str, tuple[float, int]] = {}
        self._handlers: dict[type, Callable[[float, Session, Any, Frames], None]] = {
            p.Lookup: self._lookup,
            p.Reserve: self._reserve,
            p.Commit: self._commit,
            p.Abort: self._abort,
            p.Load: self._load,
            p.Await: self._await,
            p.Release: self._release,
            p.Stats: self._stats,
            p.Ping: self._ping,
        }
        self.layered = LayeredLoads(lambda: self._core.cache, self.accounts, self._reply)
        self._handlers |= Holding(
            lambda: self._core.cache, self._keys, self._mine, self._fence, self._reply,
            settings.max_keys,
        ).handlers()  # fmt: skip

    def expect(self, now: float, left: Geometry | None) -> None:
        """The sockets open; see ``Occupancy.expect``."""
        self._occupancy.expect(now, left)

    @property
    def geometry(self) -> Geometry | None:
        """Of the clients there are; None before the first."""
        return self._occupancy.geometry

    # -- in ----------------------------------------------------------------------------------------

    def handle(self, now: float, identity: bytes, frames: Frames) -> Session | None:
        """One message. The session that is over by it (it said goodbye), or None."""
        self.messages += 1
        try:
            if not frames or len(frames) > p.MAX_FRAMES:
                raise p.MalformedError(f"{len(frames)} frames, write 1 to {p.MAX_FRAMES}")
            request = p.decode_request(frames[0])
            if isinstance(request, p.Hello):
                self._hello(now, identity, request)
                return None
            if isinstance(request, p.Bye):
                return self.sessions.of(identity)  # None where its lifeline ended first
            session = self._known(identity)
            self._core.cache.pins.heard(now, session.number)
            kind = type(request)
            if not self._tracing.enabled:
                self._handlers[kind](now, session, request, frames)
                return None
            about = {"kvtier.domain": self._name, "kvtier.client": session.name}
            with self._tracing.span(kind.__name__, about):
                self._handlers[kind](now, session, request, frames)
        except p.MalformedError as error:
            self._refuse(now, identity, _number(frames), p.Code.MALFORMED, str(error))
        except RefusedRequestError as error:
            self._refuse(now, identity, _number(frames), error.code, str(error))
        except Exception as error:
            log.exception("request failed", domain=self._name)
            words = f"{type(error).__name__}: {error}"
            self._refuse(now, identity, _number(frames), p.Code.INTERNAL, words)
        return None

    def finished(self, now: float, tickets: Sequence[Ticket]) -> None:
        """Loads that waited for NVMe are done: answer them."""
        for ticket in tickets:
            parked = self._parked.pop(ticket.lease, None)
            if parked is not None:
                session, request = parked
                # It could say nothing while it waited; its time to speak begins now.
                self._core.cache.pins.heard(now, session.number)
                self._answer_load(now, session, request, ticket)
        self.layered.look(now, tickets)

    def over(self, now: float, session: Session) -> None:
        """The client is gone, whatever the reason: everything it held goes back."""
        self.sessions.close(session)
        self._occupancy.left(now, session)
        for lease in [k for k, (owner, _) in self._parked.items() if owner is session]:
            del self._parked[lease]
        self.layered.over(session)
        self._core.cache.client_gone(now, session.number)
        self.accounts.gone(session.number)

    @property
    def parked(self) -> int:
        """Loads that wait for NVMe, those of layered ones that are waited for included."""
        return len(self._parked) + self.layered.waiting

    # -- who is there ------------------------------------------------------------------------------

    def _hello(self, now: float, identity: bytes, hello: p.Hello) -> None:
        version = spoken_with(hello)
        before = self.sessions.of(identity)
        if before is not None:
            self.over(now, before)
        # Probes have places of their own: an agent with all the engines it may have is ready.
        most = MOST_PROBES if hello.probe else self._settings.max_clients
        if sum(session.probe == hello.probe for session in self.sessions) >= most:
            raise RefusedRequestError(
                p.Code.TOO_MANY_CLIENTS, f"{most} clients are connected, which is the limit"
            )
        self._occupancy.admit(now, hello)
        layout = self._core.layout()
        geometry = self.geometry
        if layout is None or geometry is None:
            raise RefusedRequestError(p.Code.NOT_READY, "the tiers are not set up yet; try again")
        session = self.sessions.open(now, identity, hello, version)
        arenas = [
            p.ArenaInfo(a.tier, a.size_bytes, a.kind, a.chunk_bytes, list(a.handles))
            for a in layout.arenas
        ]
        welcome = p.Welcome(
            hello.id, version, self._boot, session.number, session.secret, layout.page_bytes,
            layout.slot_bytes, geometry.page_tokens, self._settings.max_keys,
            int(self._settings.lease_seconds * 1000),
            int(self._settings.lifeline_grace_seconds * 1000), arenas, self._version,
            int(self._core.cache.settings.pin_seconds * 1000),
        )  # fmt: skip
        self._reply(identity, welcome)

    def _known(self, identity: bytes) -> Session:
        session = self.sessions.of(identity)
        if session is None:
            raise RefusedRequestError(p.Code.UNKNOWN_CLIENT, "say hello first")
        if session.lifeline is None:
            raise RefusedRequestError(p.Code.NO_LIFELINE, "open the lifeline first")
        return session

    def _fence(self, boot: int) -> None:
        if boot != self._boot:
            raise RefusedRequestError(
                p.Code.STALE_BOOT, "the agent was restarted; what it granted before is void"
            )

    # -- requests ----------------------------------------------------------------------------------

    def _keys(self, frames: Frames, buffers: int) -> Any:
        if len(frames) != 1 + buffers:
            raise p.MalformedError(f"{len(frames) - 1} buffers where {buffers} belong")
        most = self._settings.max_keys
        if len(frames[1]) > most * KEY_BYTES:
            raise RefusedRequestError(
                p.Code.TOO_MANY_KEYS,
                f"{len(frames[1]) // KEY_BYTES} keys in one call; ask for at most {most}",
            )
        return p.keys_of(frames[1], most)

    def _mine(self, session: Session, frames: Frames, buffers: int) -> Any:
        """Keys of this client's parts of the pages that it names."""
        return part_keys(self._keys(frames, buffers), session.rank, session.tp)

    @staticmethod
    def _parent(session: Session, parent: bytes) -> bytes:
        return part_key(parent, session.rank, session.tp) if parent else NO_PARENT

    def _lookup(self, now: float, session: Session, request: p.Lookup, frames: Frames) -> None:
        keys = self._keys(frames, 1)
        cache = self._core.cache
        found = cache.lookup(keys) if session.tp == 1 else cache.lookup_whole(keys)
        slo = request.slo_milliseconds
        answer = cache.gate(
            found.tiers,
            depth=request.depth,
            total_tokens=request.total_tokens,
            slo_seconds=None if slo is None else max(slo, 1) / 1000,
        )
        if not session.probe and self.geometry is not None:
            self.accounts.asked(
                now, session.number, request.request, len(keys), self.geometry.page_tokens,
                depth=request.depth, total_tokens=request.total_tokens, advised=answer.load,
            )  # fmt: skip
        reply = p.Looked(request.id, found.prefix, answer.load, answer.reason)
        self._reply(session.identity, reply, found.tiers.tobytes())

    def _reserve(self, now: float, session: Session, request: p.Reserve, frames: Frames) -> None:
        keys = self._mine(session, frames, 1)
        if len(request.parent) not in (0, KEY_BYTES):
            raise p.MalformedError(f"parent of {len(request.parent)} bytes, write 16 or none")
        result = self._core.cache.reserve(
            now,
            session.number,
            keys,
            parent=self._parent(session, request.parent),
            depth=request.depth,
            partial_last=request.partial_last,
            frozen=request.frozen,
            tokens_per_second=request.tokens_per_second,
            tenant=session.tenant,
        )
        if session.protocol < p.QUOTAS_SINCE:
            result.status[result.status == PutStatus.REFUSED_QUOTA] = PutStatus.REFUSED_SPACE
        self._reply(
            session.identity, p.Reserved(request.id), result.status.tobytes(),
            result.tier.tobytes(), result.offset.tobytes(),
        )  # fmt: skip

    def _commit(self, now: float, session: Session, request: p.Commit, frames: Frames) -> None:
        self._fence(request.boot)
        keys = self._mine(session, frames, 2)
        sums = p.column(frames[2], "<u8", len(keys))
        status = self._core.cache.commit(now, session.number, keys, sums)
        self._reply(session.identity, p.Committed(request.id), status.tobytes())

    def _abort(self, now: float, session: Session, request: p.Abort, frames: Frames) -> None:
        self._fence(request.boot)
        self._core.cache.abort(now, session.number, self._mine(session, frames, 1))

    def _load(self, now: float, session: Session, request: p.Load, frames: Frames) -> None:
        keys = self._mine(session, frames, 1)
        wait = min(request.deadline_milliseconds, self._settings.longest_deadline_milliseconds)
        layered = request.layered and session.protocol >= p.UNITS_SINCE
        until = now + wait / 1000
        ticket = self._core.cache.load(now, session.number, keys, until, layered=layered)
        if ticket.done or layered:
            self._answer_load(now, session, request, ticket)
        else:
            self._parked[ticket.lease] = (session, request)

    def _answer_load(self, now: float, session: Session, request: p.Load, ticket: Ticket) -> None:
        # One part stands for the page: a group of ranks is not so many hits.
        counted = not session.probe and session.rank == 0
        if counted and self.geometry is not None and len(ticket.tier):
            self.accounts.loaded(
                now, session.number, request.request, ticket.lease, ticket.tier,
                self.geometry.page_tokens,
            )  # fmt: skip
        lease = ticket.lease
        layered: list[bytes] = []
        if request.layered and session.protocol >= p.UNITS_SINCE:
            layered.append(self.layered.began(session, ticket))
        if not (ticket.tier != MISS).any():
            # Nothing to read: no need for the client to come back with it.
            self._core.cache.release(now, session.number, lease)
            self.accounts.released(lease)
            lease = 0
        self._reply(
            session.identity, p.Loaded(request.id, lease), ticket.tier.tobytes(),
            ticket.arena.tobytes(), ticket.offset.tobytes(), ticket.checksum.tobytes(), *layered,
        )  # fmt: skip

    def _await(self, now: float, session: Session, request: p.Await, frames: Frames) -> None:
        self._fence(request.boot)
        self.layered.wait(now, session, request)

    def _release(self, now: float, session: Session, request: p.Release, frames: Frames) -> None:
        self._fence(request.boot)
        if len(frames) > 2 or (len(frames) == 2 and len(frames[1]) % 4):
            raise p.MalformedError("a release has one buffer of 32-bit indexes")
        bad = np.frombuffer(frames[1] if len(frames) == 2 else _NO_BYTES, "<u4")
        if bad.size > self._settings.max_keys:
            raise p.MalformedError(f"{bad.size} bad pages in one lease")
        cache = self._core.cache
        self.layered.ending(session, request.lease)
        if bad.size:
            cache.report_bad(now, session.number, request.lease, bad)
        if cache.release(now, session.number, request.lease):
            self.accounts.released(request.lease, bad, used=request.used)

    def _stats(self, now: float, session: Session, request: p.Stats, frames: Frames) -> None:
        self._reply(session.identity, p.Statistics(request.id, self._statistics()))

    def _ping(self, now: float, session: Session, request: p.Ping, frames: Frames) -> None:
        self._reply(session.identity, p.Pong(request.id, self._boot))

    # -- out ---------------------------------------------------------------------------------------

    def _reply(self, identity: bytes, reply: p.Reply, *buffers: bytes) -> None:
        if reply.id:
            self._send(identity, [p.encode(reply), *buffers])

    def _refuse(self, now: float, identity: bytes, number: int, code: str, message: str) -> None:
        self.refused[code] += 1
        said, count = self._said.get(code, (-QUIET_SECONDS, 0))
        if now - said >= QUIET_SECONDS:
            # One line for a flood of them; the metric counts all.
            log.warning(
                "requests refused", domain=self._name, code=code, message=message[:200],
                since_last=self.refused[code] - count,
            )  # fmt: skip
            self._said[code] = (now, self.refused[code])
        # A stranger's one-way message gets no answer, but garbage without a number does: its
        # sender would wait for nothing otherwise.
        if number or code == p.Code.MALFORMED:
            self._send(identity, [p.encode(p.Refused(number, code, message[:500]))])


def _number(frames: Frames) -> int:
    """The id of a request that is refused, 0 where it has none that can be read."""
    readable = 0 < len(frames) <= p.MAX_FRAMES and len(frames[0]) <= p.MAX_HEADER_BYTES
    return p.request_id(frames[0]) if readable else 0
