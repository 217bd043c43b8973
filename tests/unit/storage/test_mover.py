"""The mover: reads first, bounded, never an exception, nothing lost at the end."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from kvtier_agent.cache.leaving import queue_room
from kvtier_agent.cache.moves import Move, MoveKind, MoveStatus, Outcome
from kvtier_agent.cache.settings import CacheSettings
from kvtier_agent.storage.copier import Copier
from kvtier_agent.storage.mover import Mover, mover_of
from kvtier_agent.storage.settings import CoreSettings


def move(number: int, kind: MoveKind, pages: int = 1) -> Move:
    slots = np.arange(pages, dtype=np.uint32)
    keys = np.zeros((pages, 16), dtype=np.uint8)
    return Move(
        number, kind, slots, slots, slots, keys, keys, np.zeros(pages, dtype=np.uint64), slots,
        slots, slots, 4096, 4096, 0.0,
    )  # fmt: skip


class GatedCopier:
    """Moves of one kind wait for the gate; everything is noted in the order it was begun."""

    def __init__(self, kind=MoveKind.WRITE):
        self.gate = threading.Event()
        self.kind = kind
        self.begun = []

    def execute(self, one):
        self.begun.append(one.id)
        if one.kind is self.kind:
            assert self.gate.wait(30)
        return Outcome.uniform(one, MoveStatus.OK)


def collect(mover, woken, count):
    done = []
    while len(done) < count:
        assert woken.wait(30)
        woken.clear()
        done += mover.collect()
    return done


def test_reads_pass_by_writes_that_hang():
    copier, woken = GatedCopier(), threading.Event()
    mover = Mover(copier, woken.set, threads=2)
    mover.submit([move(i, MoveKind.WRITE) for i in range(5)])
    mover.submit([move(100 + i, MoveKind.READ) for i in range(20)])
    done = collect(mover, woken, 20)
    assert {one.id for one, _ in done} == set(range(100, 120))
    assert sum(i < 100 for i in copier.begun) == 1
    copier.gate.set()
    assert len(collect(mover, woken, 5)) == 5
    mover.close()


def test_past_the_bound_moves_are_cancelled_at_once():
    copier, woken = GatedCopier(), threading.Event()
    mover = Mover(copier, woken.set, queue_bytes=3 * 4096)
    mover.submit([move(i, MoveKind.WRITE) for i in range(5)])
    done = collect(mover, woken, 2)
    assert all((outcome.status == MoveStatus.CANCELLED).all() for _, outcome in done)
    copier.gate.set()
    assert len(collect(mover, woken, 3)) == 3
    assert mover.queued_bytes == 0
    mover.close()


def test_copies_between_arenas_are_all_taken():
    copier, woken = GatedCopier(MoveKind.DEMOTE), threading.Event()
    mover = Mover(copier, woken.set, queue_bytes=3 * 4096)
    mover.submit([move(i, MoveKind.DEMOTE) for i in range(20)])
    assert mover.collect() == []
    copier.gate.set()
    done = collect(mover, woken, 20)
    assert all((outcome.status == MoveStatus.OK).all() for _, outcome in done)
    assert mover.queued_bytes == 0
    mover.close()


@pytest.mark.parametrize("queue", [1 << 20, 256 << 20, 64 << 30])
def test_the_mover_takes_more_writes_than_the_cache_hands_out(queue, tmp_path):
    settings = CoreSettings(
        domain="d", arena_folder=tmp_path, table_path=tmp_path / "t", volumes={},
        maximum_l0_bytes=0, maximum_l1_bytes=0, cache=CacheSettings(write_queue_bytes=queue),
    )  # fmt: skip
    copier, woken = GatedCopier(), threading.Event()
    mover = mover_of(settings, copier, woken.set, None, None)
    large = 16 << 20
    count = queue_room(queue, 0, large)
    mover.submit([replace(move(i, MoveKind.WRITE), page_bytes=large) for i in range(count)])
    assert mover.collect() == []
    copier.gate.set()
    collect(mover, woken, count)
    mover.close()


def test_reads_that_a_drive_hangs_on_leave_the_rest_its_bound():
    copier, woken = GatedCopier(MoveKind.READ), threading.Event()
    mover = Mover(copier, woken.set, queue_bytes=3 * 4096)
    mover.submit([move(i, MoveKind.READ) for i in range(4)])
    ((late, outcome),) = collect(mover, woken, 1)
    assert (late.id, outcome.error) == (3, "queue is full")
    mover.submit([move(9, MoveKind.DEMOTE), move(10, MoveKind.WRITE)])
    assert mover.collect() == []
    assert mover.queued_bytes == 5 * 4096
    copier.gate.set()
    done = collect(mover, woken, 5)
    assert all((outcome.status == MoveStatus.OK).all() for _, outcome in done)
    assert mover.queued_bytes == 0
    mover.close()


class Keeping:
    """Flights that keep what is launched."""

    def __init__(self):
        self.kept = []

    def launch(self, one, *, patient):
        self.kept.append(one)
        return True

    def run(self, heart):
        heart.stopping.wait()

    def close(self, seconds):
        pass


def test_a_read_that_its_ring_gives_back_is_done_by_a_thread_or_cancelled_at_the_end():
    copier, woken, flights = GatedCopier(), threading.Event(), Keeping()
    mover = Mover(copier, woken.set, flights=flights)
    mover.submit([move(1, MoveKind.READ), move(2, MoveKind.READ)])
    assert mover.queued_bytes == 2 * 4096
    flights.by_calls(flights.kept[0])
    ((first, outcome),) = collect(mover, woken, 1)
    assert (first.id, outcome.status.tolist(), copier.begun) == (1, [MoveStatus.OK], [1])
    mover.close()
    flights.by_calls(flights.kept[1])
    ((second, outcome),) = mover.collect()
    assert (second.id, outcome.status.tolist()) == (2, [MoveStatus.CANCELLED])
    assert mover.queued_bytes == 0


def test_at_the_end_every_move_is_answered():
    copier, woken = GatedCopier(), threading.Event()
    mover = Mover(copier, woken.set)
    mover.submit([move(i, MoveKind.WRITE) for i in range(5)])
    threading.Timer(0.2, copier.gate.set).start()
    mover.close()
    assert sorted(one.id for one, _ in mover.collect()) == [0, 1, 2, 3, 4]
    mover.submit([move(9, MoveKind.READ)])
    ((_, outcome),) = mover.collect()
    assert (outcome.status == MoveStatus.CANCELLED).all()


def test_what_goes_wrong_is_an_outcome():
    outcome = Copier().execute(move(1, MoveKind.DEMOTE, 3))  # no arenas at all
    assert outcome.status.tolist() == [MoveStatus.IO_ERROR] * 3
    assert outcome.error.startswith("l0->l1: ")
    outcome = Copier().execute(move(1, MoveKind.WRITE))
    assert outcome.status.tolist() == [MoveStatus.CANCELLED]
