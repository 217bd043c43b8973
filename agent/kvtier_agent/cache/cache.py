"""`Cache`: the state machine of one trust domain's pages, as its clients see it.

A page's life: `reserve` gives a client a slot (WRITING), `commit` makes the page visible in L0 or
L1, `load` pins it under a lease, `release` unpins it. Between those calls the page moves by itself:
down when a tier is full (`traffic`), up after a hit if it is worth it. `take_moves` says what is to
be copied, `move_done` what became of it. Nothing here reads a clock, waits, or touches a byte.

Rules that this module alone keeps:

- A load is of a prefix: pages behind the first one that is not there are not pinned.
- A hit in L0 is leased from L0; one in L1 or L2 is leased from L1 and promoted after its release.
- A chain is touched tail to head, ancestors last, so that leaves are evicted before their parents.
- What a client holds ends with the client, or with time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.asking import pages_to_load, prefix_of
from kvtier_agent.cache.deletion import Deletion
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.identity import NO_PARENT, KeyArray
from kvtier_agent.cache.leases import LeaseBook
from kvtier_agent.cache.loads import Loads
from kvtier_agent.cache.moves import Move, Outcome
from kvtier_agent.cache.outcomes import Outcomes
from kvtier_agent.cache.page_table import PageTable
from kvtier_agent.cache.parts import whole_pages
from kvtier_agent.cache.pins import Pins
from kvtier_agent.cache.pressure import Level
from kvtier_agent.cache.progress import Units
from kvtier_agent.cache.puts import Puts
from kvtier_agent.cache.quotas import NOBODY
from kvtier_agent.cache.record import TIER_OF_STATE, Rows, State, as_u64_pairs
from kvtier_agent.cache.results import (
    MISS,
    U8,
    U64,
    CacheSnapshot,
    GateAnswer,
    LookupResult,
    PinResult,
    PutResult,
    Ticket,
)
from kvtier_agent.cache.settings import Behaviour, Budgets, CacheSettings
from kvtier_agent.cache.shaping import Shaping
from kvtier_agent.cache.shelves import Shelves
from kvtier_agent.cache.snapshot import take_snapshot
from kvtier_agent.cache.traffic import Traffic
from kvtier_agent.cache.worth import Worth
from kvtier_agent.value.costs import CostModel

NO_BUDGETS = Budgets(0, 0, 0)
UNSHAPED = Geometry.of_page_bytes(4096, 1)
"""Stands in until the first client tells the real one; no slot is made of it."""


class Cache(Shaping):
    """All page state of one trust domain. Owned by one thread; no clock, no I/O.

    `now` is seconds on one monotonic clock. Clients are integers that the server picks.
    """

    def __init__(
        self,
        table: PageTable,
        geometry: Geometry | None = None,
        *,
        settings: CacheSettings | None = None,
        maximum_slots: tuple[int, int, int] = (1 << 24, 1 << 24, 1 << 30),
    ) -> None:
        """An empty cache that admits nothing until it has a geometry (here or by `register`) and
        `reconfigure` was called. `maximum_slots`: positions that exist in each tier's arena or
        files."""
        settings = settings or CacheSettings()
        self.table = table
        self.shaped = geometry is not None
        self.geometry = geometry = geometry or UNSHAPED
        self.settings = settings
        self.behaviour = Behaviour(admitting=False)
        self.budgets = NO_BUDGETS
        self.l2_slots: int | None = None
        self.shelves = Shelves(table, maximum_slots)
        self.counters = self.shelves.counters
        self.costs = CostModel()
        self.worth = Worth(
            geometry, self.behaviour, settings, self.costs, settings.recompute_tokens_per_second
        )
        self.traffic = Traffic(self.shelves, self.worth)
        self.outcomes = Outcomes(self.traffic)
        self.book = LeaseBook(settings.lease_seconds)
        self.puts = Puts(self.shelves, self.traffic, self.worth, self.book)
        self.loads = Loads(self.shelves, self.traffic, self.worth, self.book)
        self.pins = Pins(self.shelves, self.traffic, self.loads, settings)
        self.deletion = Deletion(self.shelves, self.traffic)
        self.level = Level.NORMAL
        self._now = 0.0

    # -- asking -----------------------------------------------------------------------------

    def lookup(self, keys: KeyArray) -> LookupResult:
        """Where each page is. No side effects."""
        tiers: U8 = TIER_OF_STATE.take(self.table.states(as_u64_pairs(keys)))
        return LookupResult(tiers, prefix_of(tiers))

    def lookup_whole(self, keys: KeyArray) -> LookupResult:
        """Where pages of a tensor-parallel group are that every rank has its part of."""
        tiers = whole_pages(lambda parts: self.lookup(parts).tiers, keys, self.geometry.tp)
        return LookupResult(tiers, prefix_of(tiers))

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
        found pages are weighed); `slo_seconds`: None = the policy's."""
        slo = self.behaviour.slo_seconds if slo_seconds is None else slo_seconds
        return pages_to_load(self.worth, tiers, depth, total_tokens, slo)

    # -- putting and loading ----------------------------------------------------------------

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
        tenant: int = NOBODY,
    ) -> PutResult:
        """Reserve slots for pages the client is about to write.

        `keys`: a chain in prefix order; `parent`: key of the page before keys[0] (or the root);
        `depth`: tokens before keys[0]; `partial_last`: the last page is not full; `frozen`: name
        of a frozen prefix these pages belong to; `tokens_per_second`: the engine's prefill speed;
        `tenant`: `quotas.tenant_number` of whose pages they are.
        """
        result = self.puts.reserve(
            now,
            client,
            keys,
            parent=parent,
            depth=depth,
            partial_last=partial_last,
            frozen=frozen,
            tokens_per_second=tokens_per_second,
            tenant=tenant,
        )
        self._balance(now)
        return result

    def commit(self, now: float, client: int, keys: KeyArray, checksums: U64) -> U8:
        """The bytes are in the slots: make the pages visible. uint8 (n,) of CommitStatus."""
        status = self.puts.commit(now, client, keys, checksums)
        self._balance(now)
        return status

    def abort(self, now: float, client: int, keys: KeyArray) -> int:
        """Give reservations back; how many there were."""
        count = self.puts.abort(client, keys)
        self._balance(now)
        return count

    def load(
        self,
        now: float,
        client: int,
        keys: KeyArray,
        deadline: float,
        *,
        frozen: str | None = None,
        layered: bool = False,
    ) -> Ticket:
        """Pin pages for a client. Pages behind the first miss are misses too (a prefix with a hole
        is of no use). `deadline`: seconds on the clock of `now`; `frozen`: as in `reserve`.
        `layered`: a ticket that is not done says where pages are landing, `units` how far."""
        ticket = self.loads.load(now, client, keys, deadline, layered=layered)
        prefixes = self.shelves.frozen.numbers(frozen, keys)
        if prefixes is not None:
            hit = ticket.tier != MISS
            self.puts.freeze(now, prefixes[hit], self.table.lookup(keys)[hit])
        return ticket

    def units(self, client: int, lease: int) -> Units | None:
        """How many transfer units of each page of a lease are there, uint16 per key asked, or
        `NOT_COMING`. None: this client has no such lease."""
        return self.loads.units(client, lease)

    def record_misses(self, pages: int, tokens: int) -> None:
        """Count pages that a client asked for and had to recompute."""
        self.counters.misses += pages
        self.counters.miss_tokens += tokens

    def release(self, now: float, client: int, lease: int) -> bool:
        """Unpin. False: no such lease of this client (expired, released, of an earlier boot)."""
        released = self.loads.release(now, client, lease)
        self._balance(now)
        return released

    def report_bad(self, now: float, client: int, lease: int, indexes: NDArray[np.integer]) -> int:
        """The client's copy of these pages of its lease failed verification: drop and count them.
        How many pages were quarantined."""
        return self.loads.report_bad(client, lease, indexes)

    def scrubbed(self, read: int, rows: Rows, seqs: NDArray[np.uint32]) -> None:
        """A scrub of L1 read that many pages; those at `rows` were bad when their records had these
        `seqs`: what has not changed since is dropped and counted."""
        self.loads.scrubbed(read, rows, seqs)

    # -- keeping and deleting ---------------------------------------------------------------

    def pin(self, now: float, client: int, keys: KeyArray) -> PinResult:
        """Keep pages where they are, in HBM or DRAM (what lies in NVMe is read up), until `unpin`,
        or the client ends or is silent for `pin_seconds`. Pinning again is no second pin."""
        result = self.pins.pin(now, client, keys)
        self._balance(now)
        return result

    def unpin(self, now: float, client: int, keys: KeyArray) -> int:
        """End pins of this client; how many there were."""
        count = self.pins.unpin(client, keys)
        self._balance(now)
        return count

    def delete(self, now: float, keys: KeyArray) -> U8:
        """No lookup finds these pages from now on; their bytes go in batches, those of pages that
        are pinned, leased or moving after that. uint8 (n,) of DeleteStatus."""
        status = self.deletion.delete(keys)
        self._balance(now)
        return status

    # -- ends -------------------------------------------------------------------------------

    def client_gone(self, now: float, client: int) -> None:
        """Take back all that a client holds; its pending tickets are void."""
        self.pins.end_all(client)
        for lease_id in sorted(self.book.by_client.get(client, ())):
            self.loads.release(now, client, lease_id)
        self.puts.give_up(client, self.book.reserved_rows(client))
        self.counters.clients_gone += 1
        self._balance(now)

    def tick(self, now: float) -> list[Ticket]:
        """Expire what clients hold, and deadlines; act on pressure. Tickets that timed out."""
        tickets = self.loads.time_out(now)
        self.loads.expire(now)
        self.pins.expire(now)
        for client, rows in self.book.expired_reservations(now):
            self.counters.expired_reservations += rows.size
            self.puts.give_up(client, rows)
        self._balance(now)
        return tickets

    def next_due(self) -> float | None:
        """When `tick` has something to do next; None: nothing is waiting for the clock."""
        times = [self.book.next_due(), self.traffic.quarantine.next_due(), self.pins.next_due()]
        times.append(self._now if self.deletion.waiting else None)
        return min((time for time in times if time is not None), default=None)

    def drop_all(self, now: float) -> int:
        """Drop every page that is not leased, reserved or moving; pins end. How many."""
        self.pins.lose_all()
        table = self.table
        rows = table.live_rows()
        state = table.state[rows]
        idle = np.isin(state, (State.IN0, State.IN1, State.IN2)) & (table.pins[rows] == 0)
        self.shelves.forget(rows[idle])
        return int(idle.sum())

    # -- moving -----------------------------------------------------------------------------

    def make_room(self) -> None:
        """What the next put will want is made room for, while nobody waits."""
        self.traffic.make_room(self._now)

    def take_moves(self) -> list[Move]:
        """Moves decided since the last call. The caller must execute or cancel every one."""
        self.traffic.orders(self._now)
        moves, self.traffic.moves = self.traffic.moves, []
        return moves

    def heard(self, move: Move, landed: Units) -> None:
        """Of a move under way: units of its pages have landed."""
        early = self.traffic.progress.heard(move, landed, self.geometry.units)
        self.counters.early_units += early

    def move_done(self, now: float, move: Move, outcome: Outcome) -> list[Ticket]:
        """A move ended. Tickets that are finished by it."""
        landed, failed = self.outcomes.finish(now, move, outcome)
        tickets = self.loads.landed(landed, failed)
        self.pins.lose(failed)
        self._balance(now)
        return tickets

    def _balance(self, now: float) -> None:
        self._now = max(self._now, now)
        self.deletion.collect()
        level = self.traffic.balance(now)
        if self.shelves.frozen.waiting and self.shelves.pools[0].available:
            self.traffic.promote(now, self.shelves.frozen.waiting_in_dram(self.table))
        self.shelves.compact()
        if level is not self.level:
            self.counters.tightened += level is Level.TIGHTEN
            self.counters.demote_all += level is Level.DEMOTE
            self.level = level

    def snapshot(self, now: float) -> CacheSnapshot:
        """Plain numbers for status and metrics."""
        return take_snapshot(self, now)
