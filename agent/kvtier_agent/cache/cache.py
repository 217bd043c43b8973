"""`Cache`: the state machine of one trust domain's pages. (Signatures; see the module's story.)"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.identity import NO_PARENT, KeyArray
from kvtier_agent.cache.moves import Move, Outcome
from kvtier_agent.cache.results import (
    CacheSnapshot,
    GateAnswer,
    LookupResult,
    PutResult,
    Registration,
    Ticket,
)
from kvtier_agent.cache.settings import Behaviour, Budgets


class Cache:
    """All page state of one trust domain. Owned by one thread; no clock, no I/O.

    `now` is seconds on one monotonic clock. Clients are integers that the server picks.
    """

    def register(self, now: float, geometry: Geometry) -> Registration:
        """Accept a client's geometry. The first one sets the slots; another is refused."""
        raise NotImplementedError

    def lookup(self, keys: KeyArray) -> LookupResult:
        """Where each page is. No side effects."""
        raise NotImplementedError

    def gate(
        self,
        tiers: NDArray[np.uint8],
        *,
        depth: int = 0,
        total_tokens: int | None = None,
        slo_seconds: float | None = None,
    ) -> GateAnswer:
        """How many of the leading pages to load. `tiers`: from `lookup`, of pages that start
        `depth` tokens into the request; `total_tokens`: the request's length (None: only the
        loading is weighed); `slo_seconds`: None = the policy's."""
        raise NotImplementedError

    def reserve(
        self,
        now: float,
        client: int,
        keys: KeyArray,
        *,
        parent: bytes = NO_PARENT,
        depth: int = 0,
        partial_last: bool = False,
        frozen: str | None = None,
        tokens_per_second: float | None = None,
    ) -> PutResult:
        """Reserve slots for pages the client is about to write.

        `keys`: a chain in prefix order; `parent`: key of the page before keys[0] (or the root);
        `depth`: tokens before keys[0]; `partial_last`: the last page is not full; `frozen`: name
        of a frozen prefix these pages belong to; `tokens_per_second`: the engine's prefill speed.
        """
        raise NotImplementedError

    def commit(
        self, now: float, client: int, keys: KeyArray, checksums: NDArray[np.uint64]
    ) -> NDArray[np.uint8]:
        """The bytes are in the slots: make the pages visible. uint8 (n,) of CommitStatus."""
        raise NotImplementedError

    def abort(self, now: float, client: int, keys: KeyArray) -> int:
        """Give reservations back; how many there were."""
        raise NotImplementedError

    def load(self, now: float, client: int, keys: KeyArray, deadline: float) -> Ticket:
        """Pin pages for a client. Pages after the first miss are misses too (a prefix with a hole
        is of no use). `deadline`: seconds on the clock of `now`."""
        raise NotImplementedError

    def release(self, now: float, client: int, lease: int) -> bool:
        """Unpin. False: no such lease of this client (expired, released, of an earlier boot)."""
        raise NotImplementedError

    def report_bad(self, now: float, client: int, lease: int, indexes: NDArray[np.integer]) -> int:
        """The client's copy of these pages of its lease failed verification: drop and count them.
        How many pages were quarantined."""
        raise NotImplementedError

    def client_gone(self, now: float, client: int) -> None:
        """Take back all leases and reservations of a client; its pending tickets are void."""
        raise NotImplementedError

    def take_moves(self) -> list[Move]:
        """Moves decided since the last call. The caller must execute or cancel every one."""
        raise NotImplementedError

    def move_done(self, now: float, move: Move, outcome: Outcome) -> list[Ticket]:
        """A move ended. Tickets that are finished by it."""
        raise NotImplementedError

    def reconfigure(self, now: float, behaviour: Behaviour, budgets: Budgets) -> None:
        """A new revision, live: what still fits stays. (Use `Core.reconfigure`, which makes room
        in the arenas first.)"""
        raise NotImplementedError

    def tick(self, now: float) -> list[Ticket]:
        """Expire leases, reservations and deadlines; act on pressure. Tickets that timed out."""
        raise NotImplementedError

    def next_due(self) -> float | None:
        """When `tick` has something to do next; None: nothing is waiting for the clock."""
        raise NotImplementedError

    def drop_all(self, now: float) -> int:
        """Drop every page that is not pinned or moving (orphan grace over). How many."""
        raise NotImplementedError

    def record_misses(self, pages: int, tokens: int) -> None:
        """Count pages that a client asked for and had to recompute."""
        raise NotImplementedError

    def snapshot(self, now: float) -> CacheSnapshot:
        """Plain numbers for status and metrics."""
        raise NotImplementedError
