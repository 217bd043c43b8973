"""Booking what the mover did: every finished move puts its pages where they now are, or back.

A copy counts only if it succeeded and nobody pinned or doomed the page meanwhile; otherwise the
page is where it was and the target's slot is free again. A failed write leaves the page in L1 (bad
bytes apart: those are quarantined, never written), as cold as it was if the write was not even
tried; a failed read takes the page out of the cache and makes its segment suspect, unless a power
cut kept the page from being written. After a write that failed for the drive's sake, writing
pauses, first for 1 s, then twice as long each time up to 60 s; where slots are needed until then,
cold pages are dropped instead.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.moves import Move, MoveKind, MoveStatus, Outcome
from kvtier_agent.cache.record import Flag, Rows, State
from kvtier_agent.cache.replacement import cooled_down
from kvtier_agent.cache.shelves import HAS_L2
from kvtier_agent.cache.traffic import NOBODY, Traffic

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0


class Outcomes:
    """The other half of `Traffic`."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self._pause = 0.0

    def finish(self, now: float, move: Move, outcome: Outcome) -> tuple[Rows, Rows]:
        """Book a finished move. Returns (rows that landed in L1, rows that failed to) of reads;
        the failed ones are doomed or back in L2, and still pinned by those who waited."""
        self.traffic.in_flight -= 1
        self.traffic.progress.end(move)
        if not move.kind.carries_pages:
            self._order(now, move, outcome)
            return NOBODY, NOBODY
        ok = outcome.status == MoveStatus.OK
        self.traffic.shelves.counters.failed_moves += int(
            (~ok & (outcome.status != MoveStatus.CANCELLED)).sum()
        )
        good = int(ok.sum())
        self.traffic.reclaim.stir()
        if good and move.kind is not MoveKind.COMPACT:
            self.traffic.worth.costs.measured(
                move.kind.value, good, move.page_bytes, outcome.seconds * good / len(move)
            )
        if move.kind is MoveKind.READ:
            landed, failed = self._finish_read(now, move.rows, outcome.status)
            self.traffic.shelves.frozen.came_up(landed, self.traffic.shelves.table)
            return landed, failed
        if move.kind is MoveKind.COMPACT:
            self._pause_after(now, outcome.status)
            self.traffic.reclaim.finish(move, outcome.status)
        elif move.kind is MoveKind.WRITE:
            self._finish_write(now, move, outcome.status)
        else:
            self._finish_copy(now, move, outcome.status)
        self.traffic.shelves.frozen.stir(move.rows)
        return NOBODY, NOBODY

    def _finish_copy(self, now: float, move: Move, status: NDArray[np.uint8]) -> None:
        """Demotions and promotions: the page is at the target, or still at its source."""
        shelves, table, rows = self.traffic.shelves, self.traffic.shelves.table, move.rows
        ok = status == MoveStatus.OK
        down = move.kind is MoveKind.DEMOTE
        source, target = (0, 1) if down else (1, 0)
        home, goal = (State.IN0, State.IN1) if down else (State.IN1, State.IN0)
        if down:
            self.traffic.leaving0 -= len(rows)
            shelves.quotas.leaves(rows, 0, -1)
        stays = ~ok | (table.pins[rows] > 0) | table.has(rows, Flag.DOOMED)
        back, gone = rows[stays], rows[~stays]
        if back.size:
            shelves.counters.cancelled_moves += back.size
            shelves.disown(back, target)
            table.set_state(back, home)
            shelves.bury(back)
            self._in_order(back, home, down & (status[stays] == MoveStatus.CANCELLED))
        if not gone.size:
            return
        if not down and ((table.tiers[gone] & HAS_L2) != 0).any():
            shelves.disown(gone, 2)
            table.clear_flag(gone, Flag.L2_CLEAN)
        shelves.disown(gone, source)
        shelves.settle(gone, goal, 1 << target)
        shelves.stamp(gone if down else gone[::-1])
        size = gone.size * move.page_bytes
        counters = shelves.counters
        if down:
            table.demoted_at[gone] = now
            counters.demoted_l0 += gone.size
            counters.stored_l1 += gone.size
            counters.stored_bytes_l1 += size
            self.traffic.straight_down(now, gone)
        else:
            counters.promoted_l1 += gone.size
            counters.stored_l0 += gone.size
            counters.stored_bytes_l0 += size

    def _finish_write(self, now: float, move: Move, status: NDArray[np.uint8]) -> None:
        shelves, table, rows = self.traffic.shelves, self.traffic.shelves.table, move.rows
        self.traffic.leaving1 -= len(rows)
        shelves.quotas.leaves(rows, 1, -1)
        self.traffic.write_queue_bytes -= len(rows) * move.page_bytes
        ok = status == MoveStatus.OK
        doomed = table.has(rows, Flag.DOOMED)
        written = rows[ok & ~doomed]
        self._pause_after(now, status)
        if ok.any():
            shelves.counters.stored_l2 += int(ok.sum())
            shelves.counters.stored_bytes_l2 += int(ok.sum()) * move.page_bytes
        held = table.pins[written] > 0
        table.raise_flag(written, Flag.L2_CLEAN)
        stay, leave = written[held], written[~held]
        shelves.settle(stay, State.IN1, (1 << 1) | (1 << 2))
        shelves.stamp(stay)
        shelves.disown(leave, 1)
        shelves.settle(leave, State.IN2, 1 << 2)
        table.demoted_at[leave] = now
        shelves.stamp(leave)
        shelves.counters.demoted_l1 += leave.size
        # Everything else is in L1 as before, without a copy.
        rest = rows[~ok | doomed]
        if not rest.size:
            return
        self.traffic.suspect(rows[status == MoveStatus.IO_ERROR])
        refused = np.isin(status, (MoveStatus.NO_SPACE, MoveStatus.READ_ONLY))
        shelves.pool2.abandon(move.target[refused])
        shelves.disown(rest, 2)
        shelves.settle(rest, State.IN1, 1 << 1)
        bad = rows[(status == MoveStatus.BAD_PAGE) & ~doomed]
        shelves.counters.quarantined_pages += bad.size
        shelves.doom(bad)
        shelves.bury(rest[table.state[rest] == int(State.IN1)])
        self._in_order(rest, State.IN1, status[~ok | doomed] == MoveStatus.CANCELLED)

    def _in_order(self, rows: Rows, home: State, untried: NDArray[np.bool_]) -> None:
        """Pages that did not leave `home`, in the order again if they are there still: those whose
        move was not even tried are as cold as they were."""
        shelves, table = self.traffic.shelves, self.traffic.shelves.table
        there = (table.state[rows] == int(home)) & ~table.has(rows, Flag.DOOMED)
        shelves.stamp(rows[there & ~untried])
        shelves.stamp(rows[there & untried], cold=True)

    def _finish_read(self, now: float, rows: Rows, status: NDArray[np.uint8]) -> tuple[Rows, Rows]:
        shelves, table = self.traffic.shelves, self.traffic.shelves.table
        ok = status == MoveStatus.OK
        doomed = table.has(rows, Flag.DOOMED)
        landed = rows[ok & ~doomed]
        shelves.settle(landed, State.IN1, (1 << 1) | (1 << 2))
        shelves.counters.promoted_l2 += landed.size
        shelves.counters.read_bytes_l2 += landed.size * self.traffic.worth.geometry.page_bytes
        shelves.counters.stored_l1 += landed.size
        shelves.counters.stored_bytes_l1 += landed.size * self.traffic.worth.geometry.page_bytes
        hot = cooled_down(
            table.demoted_at[landed], now, self.traffic.worth.behaviour.cool_down_seconds
        )
        shelves.stamp(landed[hot][::-1])
        # Not cooled down: up for the lease only, and the first to leave L1 again.
        shelves.stamp(landed[~hot][::-1], cold=True)
        untried = rows[(status == MoveStatus.CANCELLED) & ~doomed]
        shelves.disown(untried, 1)
        shelves.settle(untried, State.IN2, 1 << 2)
        shelves.stamp(untried[::-1])
        unwritten = rows[(status == MoveStatus.UNWRITTEN) & ~doomed]
        self.traffic.unwritten(unwritten)
        sound = np.isin(status, (MoveStatus.OK, MoveStatus.CANCELLED, MoveStatus.UNWRITTEN))
        broken = rows[~sound & ~doomed]
        shelves.counters.quarantined_pages += broken.size
        # Of doomed ones too: an engine may have found the damage, and said so, before we did.
        self.traffic.suspect(rows[~sound])
        lost = np.concatenate([broken, unwritten])
        gone = np.concatenate([lost, rows[doomed]])
        shelves.disown(gone, 1)
        shelves.settle(gone, State.IN2, 0)  # without bytes and out of the index: until unpinned
        shelves.doom(lost)
        shelves.bury(rows[doomed])
        return landed, np.concatenate([untried, gone])

    def _pause_after(self, now: float, status: NDArray[np.uint8]) -> None:
        """Writing pauses after it failed for the drive's sake."""
        failed = np.isin(
            status,
            (
                *(MoveStatus.NO_SPACE, MoveStatus.READ_ONLY, MoveStatus.TARGET_ERROR),
                MoveStatus.IO_ERROR,
            ),
        )
        if (status == MoveStatus.OK).any():
            self._pause = 0.0
        if failed.any():
            self._pause = min(max(FIRST_PAUSE_SECONDS, 2 * self._pause), LONGEST_PAUSE_SECONDS)
            self.traffic.pause_until = now + self._pause

    def _order(self, now: float, move: Move, outcome: Outcome) -> None:
        self.traffic.reclaim.stir()
        if move.kind is MoveKind.SCRUB:
            self._tested(now, move, outcome.status == MoveStatus.OK)
        elif move.kind is not MoveKind.FORGET:
            tier = (MoveKind.PUNCH_L0, MoveKind.PUNCH_L1, MoveKind.PUNCH_L2).index(move.kind)
            pool = self.traffic.shelves.pools[tier]
            untried = outcome.status == MoveStatus.CANCELLED
            pool.punched(move.source[~untried])
            pool.punch_again(move.source[untried])

    def _tested(self, now: float, move: Move, ok: NDArray[np.bool_]) -> None:
        pool, quarantine = self.traffic.shelves.pool2, self.traffic.quarantine
        segment, last = divmod(int(move.source[-1]), pool.per_segment)
        epoch = int(move.epochs[0])
        good = len(ok) if ok.all() else int(np.argmin(ok))
        if ok.all() and last + 1 == int(move.sizes[0]):
            quarantine.end(segment, epoch)
            self.traffic.shelves.counters.scrubbed_segments += pool.healed(segment, epoch)
        else:
            quarantine.step(now, segment, epoch, good, ok=bool(ok.all()))
