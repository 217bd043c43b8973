"""The whole cache against a plain model, with real bytes and everything that can go wrong.

A machine of random calls drives `Core` with a mover whose moves finish only when a rule says so, in
any order, so that every page is met in every state. The model is a dictionary: what a page of a key
must contain. Whatever happens, a load gives those bytes or a miss; nothing leaks; caps hold. The
agent dies and comes back too: on the memory and the volume that the one before left.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import tempfile
import unittest.mock
from collections import Counter
from pathlib import Path

import leftovers
import numpy as np
import xxhash
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kvtier_agent.cache import geometry as geometries
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.results import MISS, CommitStatus, PutStatus
from kvtier_agent.cache.segment_sizes import bytes_for
from kvtier_agent.cache.settings import Behaviour, Budgets, CacheSettings, FrozenPrefix
from kvtier_agent.cache.snapshot import check_books
from kvtier_agent.cache.units import form_of
from kvtier_agent.storage.core import Core, CoreError, CoreSettings
from kvtier_agent.storage.fileio import FileIO

from soak.pins import PinRules
from soak.tenants import TenantRules

PAGE = 4096
TOKENS = 16
UNITS = 4
UNIT_BYTES = 4096
"""Of the pages of every other machine, as if units were that small."""
SCRATCH = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
CLIENTS = st.integers(1, 3)
CHAINS = st.integers(0, 5)


class FaultyIO(FileIO):
    """Fails the next calls for segments and journals with the errors it was told, then works."""

    def __init__(self) -> None:
        self.write_faults: list[int] = []
        self.read_faults: list[int] = []
        self.spared: set[int] = set()

    def open(self, path, *, create, direct):
        fd, bypasses = super().open(path, create=create, direct=direct)
        (self.spared.add if path.suffix == ".new" else self.spared.discard)(fd)
        return fd, bypasses

    def write(self, fd, buffers, offset):
        if self.write_faults and fd not in self.spared:
            fault = self.write_faults.pop()
            if fault:
                raise OSError(fault, "injected")
            short = buffers[:1] if len(buffers) > 1 else [bytes(buffers[0])[:-1]]
            return super().write(fd, short, offset)
        return super().write(fd, buffers, offset)

    def read(self, fd, buffers, offset):
        if self.read_faults:
            fault = self.read_faults.pop()
            if fault:
                raise OSError(fault, "injected")
            return super().read(fd, buffers[:1], offset)
        return super().read(fd, buffers, offset)


class HeldMover:
    """Moves wait until the test lets them finish."""

    queued_bytes = 0

    def __init__(self, copier) -> None:
        self.copier = copier
        copier.announce = lambda *news: self.heard.append(news)
        self.heard = []
        self.waiting = []
        self.done = []

    def submit(self, moves):
        self.waiting += moves

    def finish(self, index: int) -> None:
        move = self.waiting.pop(index % len(self.waiting))
        self.done.append((move, self.copier.execute(move)))

    def collect(self):
        done, self.done = self.done, []
        return done

    def news(self):
        heard, self.heard = self.heard, []
        return heard

    def close(self):
        pass


def keys_of(chain: int, count: int) -> np.ndarray:
    digests = b"".join(xxhash.xxh3_128_digest(b"%d/%d" % (chain, i)) for i in range(count))
    return np.frombuffer(digests, dtype=np.uint8).reshape(-1, 16)


class CacheMachine(PinRules, TenantRules, RuleBasedStateMachine):
    keys_of = staticmethod(keys_of)
    units = 1
    """Transfer units of a page."""
    early: random.Random
    """What `drive` draws of leases that are given back before they are done."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = unittest.mock.patch.object(geometries, "UNIT_BYTES", UNIT_BYTES)
        self.patch.start()
        self.geometry = Geometry(self.units, 1, PAGE // (2 * TOKENS), 1, TOKENS)
        self.form = form_of(self.geometry)
        assert self.form.units == self.units
        self.page, self.slot = self.geometry.page_bytes, self.geometry.slot_bytes
        self.disk = self.geometry.nvme_slot_bytes
        self.folder = Path(tempfile.mkdtemp(prefix=leftovers.owned_name(), dir=SCRATCH))
        (self.folder / "data0").mkdir()
        self.io = FaultyIO()
        self.now = 1.0
        self.total = Counter()
        """Counters of the agents before."""
        self.behaviour = Behaviour(
            cool_down_seconds=0.5, frozen=(FrozenPrefix("bot", 3 * self.slot),)
        )
        self.last_budgets = self.budgets(8, 24, 40)
        self.start()

    def start(self) -> None:
        """An agent, on what the one before left."""
        self.core = Core(
            CoreSettings(
                domain="d",
                arena_folder=self.folder,
                table_path=self.folder / "d.table",
                volumes={"data0": self.folder / "data0"},
                maximum_l0_bytes=64 * self.slot,
                maximum_l1_bytes=128 * self.slot,
                allow_root_filesystem=True,
                synchronous=True,
                cache=CacheSettings(
                    lease_seconds=30, pin_seconds=20, max_pins_per_client=5,
                    write_queue_bytes=12 * self.page, move_bytes=3 * self.page,
                    max_pages=1024,
                ),
            ),
            io=self.io,
        )  # fmt: skip
        self.mover = self.core._mover = HeldMover(self.core._copier)
        self.cache = self.core.cache
        self.core.reconfigure(self.now, self.behaviour, self.last_budgets)
        assert self.core.register(self.now, self.geometry).accepted
        self.arenas = [self.core._l0.rows(self.slot), self.core._l1.rows(self.slot)]
        self.tickets = {}
        self.reserved = []

    def budgets(self, l0: int, l1: int, l2: int) -> Budgets:
        nvme = bytes_for(l2, self.disk) + 65536 if l2 else 0  # and the journal
        return Budgets(l0 * self.slot, l1 * self.slot, nvme, ("data0",) if l2 else (), 0)

    def content(self, key: np.ndarray) -> np.ndarray:
        return np.frombuffer(key.tobytes() * (self.page // 16), dtype=np.uint8)

    def sums(self, keys: np.ndarray) -> np.ndarray:
        """Checksums of the pages of these keys."""
        return np.array([self.form.checksum(self.content(key)) for key in keys], dtype=np.uint64)

    def took(self, tickets) -> None:
        for ticket in tickets:
            assert ticket.done
            if ticket.lease in self.tickets:
                client, keys, before = self.tickets[ticket.lease]
                assert not before.done
                self.tickets[ticket.lease] = (client, keys, ticket)

    def turn(self) -> None:
        self.core.pump()
        self.took(self.core.collect(self.now))
        self.core.pump()

    # -- what clients do ----------------------------------------------------------------------

    @rule(
        client=CLIENTS,
        chain=CHAINS,
        count=st.integers(1, 10),
        skip=st.sampled_from([0, 0, 0, 2]),
        partial=st.booleans(),
        frozen=st.sampled_from([None, None, "bot", "unknown"]),
        end=st.sampled_from(["commit", "commit", "commit", "half", "abort", "leave", "lie"]),
    )
    def put(self, client, chain, count, skip, partial, frozen, end):
        keys = keys_of(chain, count + skip)[skip:]
        parent = keys_of(chain, skip)[-1].tobytes() if skip else bytes(16)
        result = self.cache.reserve(
            self.now,
            client,
            keys,
            parent=parent,
            depth=skip * TOKENS,
            partial_last=partial,
            frozen=frozen,
            tenant=self.tenant_of(client),
        )
        offered = np.flatnonzero(result.status == PutStatus.OFFERED)
        assert (result.tier[result.status != PutStatus.OFFERED] == MISS).all()
        for i in offered:
            arena = self.arenas[result.tier[i]]
            row = np.array([int(result.offset[i]) // self.slot], dtype=np.uint32)
            arena[row[0], : self.page] = self.content(keys[i])
            self.form.leave(arena, row, self.form.of_rows(arena, row))
        mine = keys[offered]
        if end == "leave":
            self.reserved.append((client, mine))
        elif end == "abort":
            assert self.cache.abort(self.now, client, mine) == len(mine)
        else:
            sums = self.sums(mine)
            if end == "lie":
                sums ^= np.uint64(1)
            if end == "half":
                mine, sums = mine[: len(mine) // 2], sums[: len(mine) // 2]
            status = self.cache.commit(self.now, client, mine, sums)
            assert (status == CommitStatus.COMMITTED).all()
            stranger = self.cache.commit(self.now, client + 10, mine, sums)
            assert (stranger == CommitStatus.UNKNOWN).all()
            if end == "half":
                self.reserved.append((client, keys[offered][len(mine) :]))
        self.turn()

    @rule(which=st.integers(0, 10))
    def commit_late(self, which):
        if self.reserved:
            client, keys = self.reserved.pop(which % len(self.reserved))
            sums = self.sums(keys)
            self.cache.commit(self.now, client, keys, sums)  # what expired meanwhile is UNKNOWN
            self.turn()

    @rule(
        client=CLIENTS, chain=CHAINS, count=st.integers(1, 12), patience=st.sampled_from([0, 5]),
        layered=st.booleans(),
    )  # fmt: skip
    def load(self, client, chain, count, patience, layered=True):
        keys = keys_of(chain, count)
        before = self.cache.lookup(keys)
        until = self.now + patience
        ticket = self.cache.load(self.now, client, keys, until, layered=layered)
        units = self.cache.units(client, ticket.lease)
        assert ((units <= self.units) == (ticket.tier != MISS)).all()
        assert (units[ticket.tier < 2] == self.units).all()
        assert ((ticket.arena != MISS) == (ticket.tier != MISS)).all() or not layered
        assert self.cache.units(client + 10, ticket.lease) is None
        self.tickets[ticket.lease] = (client, keys, ticket)
        if ticket.done:
            held = np.flatnonzero(ticket.tier != MISS)
            assert (before.tiers[held] != MISS).all()
            assert len(held) <= before.prefix
        self.turn()

    @rule(which=st.integers(0, 20))
    def read_and_release(self, which):
        done = [lease for lease, (_, _, ticket) in self.tickets.items() if ticket.done]
        if not done:
            return
        lease = done[which % len(done)]
        client, keys, ticket = self.tickets.pop(lease)
        bad = []
        if lease in self.cache.book.leases:  # an expired lease may point anywhere
            for i in np.flatnonzero(ticket.tier != MISS):
                slot = int(ticket.offset[i]) // self.slot
                copy = self.arenas[ticket.arena[i]][slot : slot + 1].copy()
                if self.form.checksum(copy[0, : self.page]) != int(ticket.checksum[i]):
                    bad.append(i)
                else:
                    right = copy[0, : self.page] == self.content(keys[i])
                    assert right.all(), "wrong bytes were served"
                    if self.units > 1:  # nobody here writes over the sums alone
                        first = np.zeros(1, dtype=np.uint32)
                        sums = self.form.of_rows(copy, first)
                        assert (self.form.left(copy, first) == sums).all()
            assert (self.cache.units(client, lease)[ticket.tier != MISS] == self.units).all()
            self.cache.report_bad(self.now, client, lease, np.array(bad, dtype=np.uint32))
            rows = self.cache.book.leases[lease].rows
            for i in bad:  # not found again; a copy stored anew meanwhile may be
                assert self.cache.table.lookup(keys[i : i + 1])[0] != rows[i]
            assert not self.cache.release(self.now, client + 10, lease)
            assert self.cache.release(self.now, client, lease)
        assert not self.cache.release(self.now, client, lease)
        self.turn()

    @rule(which=st.integers(0, 20))
    def release_early(self, which):
        """While pages of it are still on their way."""
        under_way = [lease for lease, (_, _, ticket) in self.tickets.items() if not ticket.done]
        if under_way:
            lease = under_way[which % len(under_way)]
            client, _, _ = self.tickets.pop(lease)
            self.cache.release(self.now, client, lease)
            self.turn()

    @rule(client=CLIENTS)
    def client_dies(self, client):
        self.cache.client_gone(self.now, client)
        self.tickets = {k: v for k, v in self.tickets.items() if v[0] != client}
        self.reserved = [r for r in self.reserved if r[0] != client]
        assert not self.cache.book.of_client(client)
        self.client_took_its_pins_along(client)
        self.turn()

    @rule(
        client=CLIENTS, chain=CHAINS, count=st.integers(1, 12), finish=st.booleans(),
        release=st.booleans(),
    )  # fmt: skip
    def turn_of_a_conversation(self, client, chain, count, finish, release):
        """What an engine does: load what is there, put what is not."""
        self.load(client, chain, count, 5)
        if finish:
            self.all_moves_finish()
        self.put(client, chain, count, 0, False, None, "commit")
        if release:
            self.read_and_release(len(self.tickets))

    # -- what happens around them -------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.1, 1, 6, 31]))
    def time_passes(self, seconds):
        self.now += seconds
        self.took(self.cache.tick(self.now))
        self.turn()

    @rule(picks=st.lists(st.integers(0, 50), max_size=8))
    def moves_finish(self, picks):
        for pick in picks:
            if self.mover.waiting:
                self.mover.finish(pick)
        self.turn()

    @rule()
    def all_moves_finish(self):
        while self.mover.waiting:
            self.mover.finish(0)
            self.turn()
        self.turn()

    @rule(
        l0=st.sampled_from([0, 4, 8, 16]),
        l1=st.sampled_from([8, 24, 40]),
        l2=st.sampled_from([0, 10, 40, 80]),
        threshold=st.sampled_from([0, 0, 50_000, 90_000, 300_000]),
        admitting=st.sampled_from([True, True, False]),
        demote=st.sampled_from([95, 60]),
        frozen=st.sampled_from([0, 3, 8]),
    )
    def new_revision(self, l0, l1, l2, threshold, admitting, demote, frozen):
        behaviour = Behaviour(
            cool_down_seconds=0.5,
            threshold_microseconds_per_mib=(threshold, threshold, threshold // 2),
            admitting=admitting, tighten_percent=min(90, demote), demote_percent=demote,
            frozen=(FrozenPrefix("bot", frozen * self.slot),), quotas=self.behaviour.quotas,
        )  # fmt: skip
        budgets = self.budgets(l0, l1, l2)
        failing = bool(self.io.write_faults or self.io.read_faults)
        try:
            self.core.reconfigure(self.now, behaviour, budgets)
        except CoreError:
            assert failing, "a revision was refused though the drive works"
        else:
            self.behaviour, self.last_budgets = behaviour, budgets
        self.turn()

    @rule(way=st.sampled_from(["killed", "stopped"]), settled=st.booleans())
    def agent_restarts(self, way, settled):
        """Under the same revision, and on a drive that works: else it would be refused and tried
        again. What the movers were at is lost with the process."""
        if settled:
            self.all_moves_finish()
        self.io.read_faults.clear()
        self.io.write_faults.clear()
        self.total.update(self.cache.counters.as_dict())
        self.total["restarts"] += 1
        shrinks = bool(self.cache.shelves.pool2.excess)
        if way == "stopped":
            self.core.close()
        else:  # the kernel closes what is open, nothing else happens
            os.close(self.core.memory._lock)
            self.core.memory._lock = -1
            self.core.nvme.close()
        self.start()
        dropped = self.cache.counters.dropped_found_pages
        assert shrinks or not dropped, f"{dropped} pages of NVMe are gone by a mere restart"
        self.turn()

    @rule(
        faults=st.lists(st.sampled_from([errno.EIO, errno.ENOSPC, errno.EROFS, 0]), max_size=3),
        reads=st.booleans(),
    )
    def drive_fails(self, faults, reads):
        (self.io.read_faults if reads else self.io.write_faults)[:] = faults

    @rule(arena=st.integers(0, 1), slot=st.integers(0, 40))
    def memory_is_scribbled_over(self, arena, slot):
        self.arenas[arena][slot, 7] ^= 0xFF

    @rule(slot=st.integers(0, 15), where=st.sampled_from([8, 20, 110, 5000]))
    def drive_flips_bits(self, slot, where):
        for path in self.folder.glob("data0/kvtier/d/segment-*.kv"):
            with path.open("r+b") as file:
                file.seek(slot * self.disk + where)
                byte = file.read(1)
                if byte:
                    file.seek(slot * self.disk + where)
                    file.write(bytes([byte[0] ^ 0xFF]))

    # -- what always holds --------------------------------------------------------------------

    @invariant()
    def books_are_straight(self):
        check_books(self.cache)

    @invariant()
    def caps_hold(self):
        l2 = self.core._l2
        if l2 is not None:
            assert l2.allocated_bytes <= max(l2.cap_bytes, self.shrinking())
        assert self.cache.traffic.write_queue_bytes <= 12 * self.page
        for pool in self.cache.shelves.pools[:2]:
            assert pool.used + pool.free_count <= max(pool.limit, pool.used)

    def shrinking(self) -> int:
        """Bytes that may lie above a cap that has just become smaller."""
        pool = self.cache.shelves.pool2
        return (1 << 40) if pool.excess or pool.leaving else 0

    def abandon(self) -> None:
        """After a step that failed: nothing is left in memory."""
        self.patch.stop()
        self.core.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def teardown(self):
        try:
            for client in (1, 2, 3):
                self.cache.client_gone(self.now, client)
            self.io.read_faults.clear()
            self.io.write_faults.clear()
            for _ in range(50):
                self.turn()
                if not self.mover.waiting:
                    break
                while self.mover.waiting:
                    self.mover.finish(0)
            assert not self.mover.waiting, "traffic never comes to rest"
            check_books(self.cache)
            snapshot = self.cache.snapshot(self.now)
            assert not (self.cache.table.pins[: self.cache.table.capacity] > 0).any()
            assert snapshot.leases == snapshot.reservations == snapshot.pending_tickets == 0
            assert snapshot.write_queue_bytes == 0
            assert self.cache.traffic.in_flight == 0
            for tier in snapshot.tiers[:2]:
                assert tier.used_bytes <= tier.capacity_bytes or tier.name == "hbm"
                assert tier.pages * self.slot == tier.used_bytes
            # Every page that is still there can be had, and is right.
            self.core.reconfigure(self.now, self.behaviour, self.cache.budgets)
        finally:
            self.patch.stop()
            self.core.close()
            shutil.rmtree(self.folder)


class UnitsMachine(CacheMachine):
    """With pages of several transfer units."""

    units = UNITS


def drive(seed: int, steps: int) -> Counter[str]:
    """The same calls from a seeded generator with the weights of a busy day: gets deeper into the
    life of a cache than a search that restarts every few steps. Of odd seeds pages have several
    transfer units."""
    rng, others = random.Random(seed), random.Random(seed + 1_000_000)
    machine = UnitsMachine() if seed % 2 else CacheMachine()
    machine.early = random.Random(seed + 2_000_000)
    try:
        for _ in range(steps):
            step(machine, rng, others)
            machine.books_are_straight()
            machine.caps_hold()
            machine.quotas_are_kept()
    except BaseException:
        machine.abandon()
        raise
    machine.total.update(machine.cache.counters.as_dict())
    machine.teardown()
    return machine.total


def step(machine: CacheMachine, rng: random.Random, others: random.Random) -> None:
    """One call of chance."""
    ends = ["commit"] * 6 + ["half", "abort", "leave", "lie"]
    client, chain, count = rng.randint(1, 3), rng.randint(0, 5), rng.randint(1, 12)
    action = rng.random()
    if action < 0.45:
        machine.turn_of_a_conversation(client, chain, count, rng.random() < 0.5, rng.random() < 0.8)
    elif action < 0.55:
        frozen = rng.choice([None, None, "bot"])
        partial = rng.random() < 0.2
        machine.put(client, chain, count, rng.choice([0, 0, 3]), partial, frozen,
                    rng.choice(ends))  # fmt: skip
    elif action < 0.65:
        machine.load(client, chain, count, rng.choice([0, 5]))
    elif action < 0.75:
        machine.read_and_release(rng.randint(0, 20))
        if machine.early.random() < 0.1:
            machine.release_early(machine.early.randint(0, 20))
    elif action < 0.85:
        machine.moves_finish([rng.randint(0, 50) for _ in range(6)])
    elif action < 0.90:
        machine.time_passes(rng.choice([0.1, 0.1, 0.3, 0.3, 1, 1, 6, 31]))
    elif action < 0.92:
        machine.commit_late(rng.randint(0, 9))
    elif action < 0.94:
        machine.drive_fails([rng.choice([errno.EIO, errno.ENOSPC, 0])], rng.random() < 0.5)
    elif action < 0.955:
        machine.memory_is_scribbled_over(rng.randint(0, 1), rng.randint(0, 20))
    elif action < 0.97:
        machine.drive_flips_bits(rng.randint(0, 8), rng.choice([8, 20, 5000]))
    elif action < 0.985:
        machine.new_revision(
            rng.choice([0, 4, 8, 8, 16]), rng.choice([8, 24, 40]), rng.choice([0, 40, 40, 80]),
            rng.choice([0, 0, 0, 50_000, 90_000, 300_000]), rng.random() < 0.9,
            rng.choice([95, 60]), rng.choice([0, 3, 8]),
        )  # fmt: skip
    elif action < 0.99:
        machine.client_dies(client)
    elif action < 0.995:
        machine.agent_restarts(rng.choice(["killed", "stopped"]), rng.random() < 0.5)
    if others.random() < 0.1:
        machine.keep_or_delete(others)
    if others.random() < 0.02:
        machine.change_quotas(others)
