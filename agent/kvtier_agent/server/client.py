"""The client library: what an engine, a replay or a probe holds of an agent.

    with Client("/run/kvtier/default.sock", geometry) as cache:
        found = cache.lookup(keys, total_tokens=len(prompt))
        with cache.load(keys[: found.load]) as lease:
            good = lease.copy_to(pages)          # verified copies; good[i] False = recompute
        ...compute the rest...
        cache.put(keys[n:], new_pages, depth=n * geometry.page_tokens, parent=bytes(keys[n - 1]))

A cache must never be the reason that a request fails. So every call has a deadline, and whatever
goes wrong (no agent, agent restarted, timeout, refusal) is answered as "nothing cached" or "not
stored", unless the client was made with ``raise_errors=True``. While there is no agent the calls
return at once; a background thread looks for one and says hello again.

A restarted agent is another agent: the client takes its new boot token and arenas, and leases and
reservations of the old one are void (see ``lease``). One client may be used from several threads:
calls are made one after the other, and the wait for its turn is part of a call's time. A client
that nobody holds any more leaves by itself. After a fork the child's client starts afresh.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.identity import root_key
from kvtier_agent.cache.units import form_of
from kvtier_agent.server import arguments
from kvtier_agent.server import protocol as p
from kvtier_agent.server.answers import (
    ClientCounters,
    Deleted,
    Lookup,
    Pinned,
    PutResult,
    Stored,
)
from kvtier_agent.server.arguments import as_keys
from kvtier_agent.server.connection import (
    AgentError,
    AgentGoneError,
    AgentTimeoutError,
    RefusedError,
)
from kvtier_agent.server.keeping import Keeping
from kvtier_agent.server.layered_lease import LayeredLease
from kvtier_agent.server.lease import Lease, Reservation
from kvtier_agent.server.link import Link
from kvtier_agent.server.mapping import UnmappedError, rows_of


class Client(Keeping):
    """A connection to the agent of one trust domain that mends itself. See the module's story."""

    def __init__(
        self,
        socket: Path | str,
        geometry: Geometry,
        *,
        timeout_seconds: float = 1.0,
        tenant: str = "",
        tenant_salt: bytes | None = None,
        name: str = "",
        raise_errors: bool = False,
        probe: bool = False,
        kv_pool_bytes: int = 0,
        rank: int = 0,
    ) -> None:
        """``timeout_seconds`` bounds every question to the agent, the wait for its turn among this
        client's threads included (default 1 s; a ``load`` has its own deadline more, where one is
        given; a ``put`` asks twice). ``tenant``: for whom these pages count where a policy has
        quotas (lower-case letters, digits and -). ``tenant_salt`` enters ``root``, so that tenants
        share no page; by default the tenant's name. Tenants with one salt share.
        ``raise_errors``: raise ``AgentError`` instead of answering "nothing cached".
        ``kv_pool_bytes``: size of the engine's own KV pool on this rank, where it is L0.
        ``rank``: of ``geometry.tp``. What is put, loaded and pinned are this rank's parts of pages;
        ``lookup`` counts a page when every rank's part is there, ``delete`` deletes all of them.

        An agent that is not there, or that refuses this client, is no error here either: see
        ``connected`` and ``counters.last_error``. Arguments that no agent could make sense of raise
        ``ValueError``, here and in every call.
        """
        self.geometry = arguments.geometry_names(geometry)
        self.timeout_seconds = timeout_seconds = arguments.timeout(timeout_seconds)
        tenant = arguments.tenant(tenant)
        salt = tenant.encode() if tenant_salt is None else tenant_salt
        self.root = root_key(geometry.fingerprint, salt)
        """Parent key of every first page of this geometry and tenant."""
        self.page_bytes = geometry.page_bytes
        self.form = form_of(geometry)
        """How pages are cut into transfer units."""
        self._link = Link(
            Path(socket),
            geometry,
            timeout_seconds=timeout_seconds,
            name=arguments.text("name", str(name)[: p.MAX_NAME_BYTES]),
            probe=probe,
            raise_errors=raise_errors,
            kv_pool_bytes=arguments.whole("kv_pool_bytes", kv_pool_bytes, arguments.MOST_NUMBER),
            rank=arguments.whole("rank", rank, geometry.tp - 1),
            tenant=tenant,
        )

    # -- the request path ------------------------------------------------------------------------

    def lookup(
        self,
        keys: Any,
        *,
        slo_milliseconds: int | None = None,
        total_tokens: int | None = None,
        depth: int = 0,
        request: int = 0,
    ) -> Lookup:
        """Where these pages (keys in prefix order, (n, 16) uint8) are, and how many to load.

        ``total_tokens``: tokens of the whole prompt; ``depth``: tokens in front of the first key.
        ``request``: the engine's own number where it asks for several requests in turn, or loads
        through another client: the hits of a later ``load`` count for the lookup of that number.
        """
        names = as_keys(keys)
        n = len(names)
        depth = arguments.tokens("depth", depth)
        request = arguments.whole("request", request, arguments.MOST_NUMBER)
        if slo_milliseconds is not None:
            slo_milliseconds = arguments.milliseconds("slo_milliseconds", slo_milliseconds)
        if total_tokens is not None:
            total_tokens = arguments.tokens("total_tokens", total_tokens)
        with self._link.asking(self.timeout_seconds) as (connection, left):
            if connection is not None and n:
                asked = names[: connection.welcome.max_keys]
                head, columns = connection.request(
                    p.Lookup(
                        connection.next_id(), depth, slo_milliseconds, total_tokens, request
                    ),
                    (asked.data,), left, p.Looked,
                )  # fmt: skip
                tiers = _padded(p.column(columns[0], "u1", len(asked)).copy(), n, p.MISS)
                return Lookup(tiers, head.prefix, head.load, head.reason)
        return Lookup(np.full(n, p.MISS, np.uint8), 0, 0, "no-agent" if n else "empty")

    @overload
    def load(
        self, keys: Any, *, deadline_milliseconds: int | None = None, request: int = 0,
        layered: Literal[False] = False,
    ) -> Lease: ...  # fmt: skip

    @overload
    def load(
        self, keys: Any, *, deadline_milliseconds: int | None = None, request: int = 0,
        layered: Literal[True],
    ) -> LayeredLease: ...  # fmt: skip

    def load(
        self, keys: Any, *, deadline_milliseconds: int | None = None, request: int = 0,
        layered: bool = False,
    ) -> Lease:  # fmt: skip
        """Pin these pages for reading; pages on NVMe are brought up first.

        What has not come by the deadline (default: half of ``timeout_seconds``) is a miss, and so
        is everything after the first miss: a prefix with a hole is of no use.

        ``layered``: the lease comes at once, and is read while its pages land, transfer unit by
        transfer unit. (An agent of before brings them up whole first.)
        """
        names = as_keys(keys)
        n = len(names)
        request = arguments.whole("request", request, arguments.MOST_NUMBER)
        wait = self.timeout_seconds
        if deadline_milliseconds is None:
            until = max(1, int(wait * 500))
        else:
            until = arguments.milliseconds("deadline_milliseconds", deadline_milliseconds)
            wait += until / 1000
        with self._link.asking(wait) as (connection, left):
            if connection is not None and n:
                m = min(n, connection.welcome.max_keys)
                # What went by until this call's turn came is gone from the agent's time too.
                deadline = max(0, until - int((wait - left) * 1000))
                head, columns = connection.request(
                    p.Load(connection.next_id(), deadline, request, layered),
                    (names[:m].data,), left, p.Loaded,
                )  # fmt: skip
                tier = np.full(n, p.MISS, np.uint8)
                tier[:m] = p.column(columns[0], "u1", m)
                arena = _padded(p.column(columns[1], "u1", m), n, p.MISS)
                offset = _padded(p.column(columns[2], "<u8", m), n, 0)
                sums = _padded(p.column(columns[3], "<u8", m), n, 0)
                if layered:
                    landed = np.full(n, p.NOT_COMING, np.uint16)
                    landed[:m] = (
                        p.column(columns[4], "<u2", m) if len(columns) > 4
                        else np.where(tier[:m] == p.MISS, p.NOT_COMING, connection.form.units)
                    )  # fmt: skip
                    return LayeredLease(
                        self._link, connection, head.lease, self.form, connection.form, tier, arena,
                        offset, sums, landed=landed, until=time.monotonic() + until / 1000,
                    )  # fmt: skip
                return Lease(
                    self._link, connection, head.lease, connection.form, tier, arena, offset, sums
                )
        empty = np.full(n, p.MISS, np.uint8)
        zero = np.zeros(n, np.uint64)
        if layered:
            return LayeredLease(
                self._link, None, 0, self.form, self.form, empty, empty, zero, zero,
                landed=np.full(n, p.NOT_COMING, np.uint16), until=0.0,
            )  # fmt: skip
        return Lease(self._link, None, 0, self.form, empty, empty, zero, zero)

    def release(self, lease: Lease) -> None:
        """The same as ``lease.release()``."""
        lease.release()

    def put(
        self,
        keys: Any,
        source: Any,
        *,
        depth: int = 0,
        tokens: int | None = None,
        partial_last: bool = False,
        frozen: str | None = None,
        parent: bytes = b"",
        tokens_per_second: float | None = None,
    ) -> PutResult:
        """Store pages: reserve, copy, checksum, commit. Never waits for a lower tier.

        ``source``: (n, page_bytes) uint8, array or tensor, or a callable ``(i, destination)`` that
        writes page i there (called for the pages that are wanted only). ``depth``: tokens in
        front of the first page; ``parent``: key of the page in front of it (default: ``root`` at
        depth 0). ``tokens``: tokens in all these pages; fewer than full pages hold makes the last
        one partial. ``frozen``: name of the frozen prefix they belong to.
        ``tokens_per_second``: the prefill speed that the engine measured, 1 to 1e9.
        Raises ``ValueError`` for a source of another shape; what a callable raises is passed on
        after the slots were given back.
        """
        names = as_keys(keys)
        n = len(names)
        if tokens is not None:
            full = n * self.geometry.page_tokens
            # Below zero where the last page that was loaded already reaches past the prompt's end.
            most = arguments.MOST_TOKENS
            partial_last = partial_last or arguments.whole("tokens", tokens, most, -most) < full
        rows = None if callable(source) else rows_of(source, self.page_bytes, n)
        reservation = self.reserve(
            names, depth=depth, partial_last=partial_last, frozen=frozen, parent=parent,
            tokens_per_second=tokens_per_second,
        )  # fmt: skip
        if not reservation.offered.size:
            return PutResult(reservation.status)
        try:
            if rows is None:
                reservation.fill(source)
            else:
                reservation.write_rows(rows)
        except UnmappedError:
            reservation.outgrown()
            return PutResult(reservation.commit())
        except BaseException:
            reservation.abort()
            raise
        return PutResult(reservation.commit())

    def reserve(
        self,
        keys: Any,
        *,
        depth: int = 0,
        partial_last: bool = False,
        frozen: str | None = None,
        parent: bytes = b"",
        tokens_per_second: float | None = None,
    ) -> Reservation:
        """First half of ``put``, for engines that write into the arena themselves."""
        names = as_keys(keys)
        n = len(names)
        depth = arguments.tokens("depth", depth)
        parent = arguments.parent_key(parent) or (b"" if depth else self.root)
        if frozen is not None:
            frozen = arguments.text("frozen", frozen)
        if tokens_per_second is not None:
            tokens_per_second = arguments.rate("tokens_per_second", tokens_per_second)
        with self._link.asking(self.timeout_seconds) as (connection, left):
            if connection is not None and n:
                m = min(n, connection.welcome.max_keys)
                message = p.Reserve(
                    connection.next_id(), depth, parent, bool(partial_last) and m == n, frozen,
                    tokens_per_second,
                )  # fmt: skip
                _, columns = connection.request(message, (names[:m].data,), left, p.Reserved)
                status = _padded(p.column(columns[0], "u1", m), n, Stored.REFUSED_SPACE)
                arena = _padded(p.column(columns[1], "u1", m), n, p.MISS)
                offset = _padded(p.column(columns[2], "<u8", m), n, 0)
                return Reservation(
                    self._link, connection, names, connection.form, status, arena, offset
                )
        none = np.full(n, Stored.NO_AGENT, np.uint8)
        return Reservation(self._link, None, names, self.form, none, none, np.zeros(n, np.uint64))

    def stats(self) -> dict[str, Any]:
        """Counters and gauges of the trust domain (see ``server.stats``); {} without an agent."""
        with self._link.asking(self.timeout_seconds) as (connection, left):
            if connection is not None:
                reply, _ = connection.request(p.Stats(connection.next_id()), (), left, p.Statistics)
                return reply.values
        return {}

    def ping(self) -> bool:
        """Does the agent answer, and does it know this client?"""
        with self._link.asking(self.timeout_seconds) as (connection, left):
            if connection is not None:
                connection.request(p.Ping(connection.next_id()), (), left, p.Pong)
                return True
        return False

    # -- the life of the connection --------------------------------------------------------------

    @property
    def counters(self) -> ClientCounters:
        """What this client met since it was made."""
        return self._link.counters

    @property
    def connected(self) -> bool:
        """Is there an agent, as far as is known now?"""
        return self._link.here() is not None

    @property
    def boot(self) -> int:
        """The boot token of the agent process, 0 without one."""
        connection = self._link.here()
        return 0 if connection is None else connection.welcome.boot

    def wait_connected(self, timeout_seconds: float) -> bool:
        """Wait until an agent took this client; False when none did in time."""
        end = time.monotonic() + timeout_seconds
        while not self.connected and time.monotonic() < end:
            time.sleep(0.01)
        return self.connected

    def close(self) -> None:
        """Leave in good order; leases and reservations go back. A second call does nothing."""
        self._link.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _padded(values: NDArray[Any], n: int, fill: int) -> NDArray[Any]:
    """``values`` with ``fill`` appended up to length ``n``: keys past what one call may carry."""
    if len(values) == n:
        return values
    return np.concatenate([values, np.full(n - len(values), fill, values.dtype)])


__all__ = [
    "AgentError",
    "AgentGoneError",
    "AgentTimeoutError",
    "Client",
    "ClientCounters",
    "Deleted",
    "LayeredLease",
    "Lease",
    "Lookup",
    "Pinned",
    "PutResult",
    "RefusedError",
    "Reservation",
    "Stored",
]
