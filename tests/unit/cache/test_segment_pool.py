"""Slots of L2 are written once: against a plain model, and the sizes of segments."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kvtier_agent.cache.segment_pool import NO_ROW, SegmentPool
from kvtier_agent.cache.segment_sizes import (
    SEGMENT_BYTES,
    bytes_for,
    most_segments,
    segment_slots,
    slots_per_segment,
    slots_within,
)

PER_SEGMENT = 16
MAXIMUM = 64 * PER_SEGMENT


def u32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint32)


class PoolMachine(RuleBasedStateMachine):
    """The model: which slots are taken and by whom, and every (slot, epoch) there ever was."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SegmentPool(MAXIMUM, PER_SEGMENT)
        self.taken: dict[int, int] = {}
        self.seen: set[tuple[int, int]] = set()
        self.held: list[int] = []
        self.punching: list[int] = []
        self.testing: list[tuple[int, int]] = []
        self.bad: set[int] = set()
        self.told: set[tuple[int, int]] = set()
        self.given: set[tuple[int, int]] = set()
        self.next_row = 0

    def epoch(self, slot: int) -> int:
        return int(self.pool.uses(u32(slot))[0][0])

    @rule(limit=st.sampled_from([0, 1, 7, 40, 100, 130, 400]))
    def set_limit(self, limit):
        self.pool.set_limit(limit)

    @rule(count=st.integers(1, 60))
    def take(self, count):
        expected = min(count, self.pool.available)
        slots = self.pool.take(count)
        assert len(slots) == expected
        epochs, sizes = self.pool.uses(slots)
        assert (slots % PER_SEGMENT < sizes).all()
        for slot, epoch in zip(slots.tolist(), epochs.tolist(), strict=True):
            assert slot not in self.taken
            assert (slot, epoch) not in self.seen, "a dead slot was handed out again"
            assert slot // PER_SEGMENT not in self.bad, "a suspect segment was used"
            self.seen.add((slot, epoch))
            self.taken[slot] = self.next_row
            self.next_row += 1
        self.pool.own(slots, u32(*(self.taken[slot] for slot in slots.tolist())))

    @rule(data=st.data())
    def give(self, data):
        some = data.draw(st.lists(st.sampled_from(sorted(self.taken) or [0]), unique=True))
        some = [slot for slot in some if slot in self.taken]
        self.given |= {(slot, self.epoch(slot)) for slot in some}
        self.pool.give(u32(*some))
        for slot in some:
            del self.taken[slot]

    @rule(segment=st.integers(0, 12))
    def give_all_of_a_segment(self, segment):
        mine = [slot for slot in self.taken if slot // PER_SEGMENT == segment]
        self.given |= {(slot, self.epoch(slot)) for slot in mine}
        self.pool.give(u32(*mine))
        for slot in mine:
            del self.taken[slot]

    @rule(data=st.data())
    def hold(self, data):
        if self.taken:
            slot = data.draw(st.sampled_from(sorted(self.taken)))
            self.pool.hold(u32(slot))
            self.held.append(slot)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data):
        slot = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.let_go(u32(slot))

    @rule(data=st.data())
    def suspect(self, data):
        if self.taken:
            slot = data.draw(st.sampled_from(sorted(self.taken)))
            fresh = slot // PER_SEGMENT not in self.bad
            assert self.pool.suspect(u32(slot)) == fresh
            self.bad.add(slot // PER_SEGMENT)

    @rule()
    def tests_begin(self):
        for segment in self.pool.take_tests():
            assert segment not in self.punching, "its blocks are being given back"
            assert not {slot for slot in self.taken if slot // PER_SEGMENT == segment}
            assert self.pool.tested(segment, self.epoch(segment * PER_SEGMENT))
            self.testing.append((segment, self.epoch(segment * PER_SEGMENT)))

    @precondition(lambda self: self.testing)
    @rule(data=st.data())
    def a_test_succeeds(self, data):
        segment, epoch = self.testing.pop(data.draw(st.integers(0, len(self.testing) - 1)))
        if self.epoch(segment * PER_SEGMENT) == epoch:
            self.bad.discard(segment)
        self.pool.healed(segment, epoch)

    @rule(data=st.data())
    def retire(self, data):
        """One in use, or one that was bad: in use, waiting for its test, or on its way out."""
        used = {slot // PER_SEGMENT for slot in self.taken} | self.bad
        used = sorted(segment for segment in used if self.pool.known(segment))
        if used:
            self.pool.retire(data.draw(st.sampled_from(used)))

    @rule()
    def punches_begin(self):
        fresh = self.pool.take_punches().tolist()
        assert not {slot // PER_SEGMENT for slot in self.taken} & set(fresh)
        assert not {slot // PER_SEGMENT for slot in self.held} & set(fresh)
        self.punching += fresh

    @precondition(lambda self: self.punching)
    @rule(data=st.data(), tried=st.booleans())
    def a_punch_ends(self, data, tried):
        segment = self.punching.pop(data.draw(st.integers(0, len(self.punching) - 1)))
        if tried:
            self.pool.punched(u32(segment))
            self.bad.discard(segment)
        else:
            self.pool.punch_again(u32(segment))

    @rule()
    def what_was_given_is_told_once(self):
        told = {(int(a), int(b)) for a, b in zip(*self.pool.take_given(), strict=True)}
        assert not told & self.told
        self.told |= told
        assert self.told == self.given

    @invariant()
    def the_sums_are_right(self):
        pool = self.pool
        assert pool.used == len(self.taken)
        assert pool.backed <= pool.limit or pool.excess
        if not pool.excess:
            assert pool.used + pool.dead + pool.available >= pool.limit - pool.leaving
            assert pool.used + pool.dead <= pool.limit
        for segment in {slot // PER_SEGMENT for slot in self.taken}:
            rows = [r for slot, r in sorted(self.taken.items()) if slot // PER_SEGMENT == segment]
            assert pool.rows(segment).tolist() == rows
            assert pool.live(segment) == len(rows)
            assert pool.in_use(segment)
        free = [int(pool.size(segment)) for segment in pool._free]
        usable = sum(min(size, pool.target) for size in free)
        rest = pool.size(pool.open) - int(pool._cursor[pool.open]) if pool.open >= 0 else 0
        room = pool.limit - pool.backed - pool.leaving + sum(free) - usable
        assert pool.available == rest + usable + max(0, room)
        sealed, dead, _ = pool.sealed()
        for segment, count in zip(sealed.tolist(), dead.tolist(), strict=True):
            assert count == pool.size(segment) - pool.live(segment)


TestPoolAgainstAModel = PoolMachine.TestCase
TestPoolAgainstAModel.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def filled(limit: int = 40) -> SegmentPool:
    """A pool whose every slot is taken: eight segments of five."""
    pool = SegmentPool(MAXIMUM, PER_SEGMENT)
    pool.set_limit(limit)
    pool.own(pool.take(limit), np.arange(limit, dtype=np.uint32))
    return pool


def test_slots_are_given_in_the_order_in_which_a_segment_is_written():
    pool = SegmentPool(MAXIMUM, PER_SEGMENT)
    pool.set_limit(40)
    assert pool.take(7).tolist() == [0, 1, 2, 3, 4, 16, 17]
    assert pool.take(2).tolist() == [18, 19]


def test_a_slot_comes_again_only_with_all_of_its_segment():
    pool = filled()
    pool.give(u32(16, 17, 18, 19))
    assert (pool.available, pool.dead, pool.take(5).size) == (0, 4, 0)
    before = pool.uses(u32(16))[0]
    pool.give(u32(20))
    assert pool.available == 5
    assert pool.take(9).tolist() == [16, 17, 18, 19, 20]
    assert pool.uses(u32(16))[0] == before + 1


def test_a_slot_cannot_be_given_back_twice():
    pool = filled()
    with pytest.raises(AssertionError, match="not taken"):
        pool.give(u32(3, 3))
    pool.give(u32(3))
    with pytest.raises(AssertionError, match="not taken"):
        pool.give(u32(3))


def test_a_segment_that_is_read_for_compaction_stays_as_it_is():
    pool = filled()
    pool.hold(u32(16, 17))
    pool.give(u32(16, 17, 18, 19, 20))
    assert pool.available == 0
    pool.let_go(u32(16))
    assert pool.available == 0
    pool.let_go(u32(17))
    assert pool.available == 5


def test_a_suspect_segment_is_used_again_only_when_it_was_tested():
    pool = filled()
    assert pool.suspect(u32(16, 18)) == 1
    assert len(pool.suspects) == 1
    assert pool.take_tests() == []
    pool.give(u32(16, 17, 18, 19, 20))
    assert pool.available == 0
    assert pool.take_tests() == [1]
    pool.healed(1, int(pool.uses(u32(16))[0][0]) - 1)  # of an earlier use: means nothing
    assert pool.available == 0
    pool.healed(1, int(pool.uses(u32(16))[0][0]))
    assert (pool.available, pool.suspects) == (5, [])


@pytest.mark.parametrize("way", ["its volume is lost", "the tier shrinks"])
def test_a_segment_that_leaves_before_its_test_is_not_tested(way):
    pool = filled()
    pool.suspect(u32(16))
    pool.give(u32(16, 17, 18, 19, 20))  # empty: it is to be tested
    if way == "its volume is lost":
        pool.retire(1)
    else:
        pool.set_limit(35)
    gone = pool.take_punches()
    assert gone.tolist() == [1]
    assert pool.take_tests() == []
    pool.punched(gone)
    pool.set_limit(40)
    assert pool.take(5).tolist() == [16, 17, 18, 19, 20]  # its number is in use again


def test_a_test_is_of_one_use_of_a_segment():
    pool = filled()
    pool.suspect(u32(16))
    pool.give(u32(16, 17, 18, 19, 20))
    assert pool.take_tests() == [1]
    epoch = int(pool.uses(u32(16))[0][0])
    assert pool.tested(1, epoch)
    pool.retire(1)
    assert not pool.tested(1, int(pool.uses(u32(16))[0][0]))
    pool.punched(pool.take_punches())
    pool.take(5)
    assert not pool.tested(1, int(pool.uses(u32(16))[0][0]))
    assert not pool.healed(1, int(pool.uses(u32(16))[0][0]))


def test_a_shrink_gives_back_what_is_empty_and_waits_for_the_rest():
    pool = filled()
    pool.give(u32(*range(16, 21)))
    pool.set_limit(30)
    assert pool.take_punches().tolist() == [1]
    assert pool.excess == 5
    pool.give(u32(*range(32, 37)))
    assert pool.take_punches().tolist() == [2]
    assert (pool.excess, pool.leaving, pool.available) == (0, 10, 0)


def test_what_is_available_is_known_without_a_look_at_each_segment():
    pool = filled()
    pool.give(u32(*np.flatnonzero(pool._taken)))
    pool._size = None  # of all that is known of the segments
    assert pool.available == 40


def test_a_growth_waits_for_blocks_that_are_still_being_given_back():
    pool = filled()
    pool.give(u32(*range(16, 21)))
    pool.set_limit(35)
    gone = pool.take_punches()
    pool.set_limit(40)
    assert pool.available == 0
    pool.punched(gone)
    assert pool.take(9).size == 5


def test_claims_take_the_best_segments_that_fit():
    pool = SegmentPool(MAXIMUM, PER_SEGMENT)
    pool.set_limit(12)
    found = u32(0, 3, 16, 17, 3, 48, 20, MAXIMUM + 5)  # segment 1 has the best, then 3
    assert pool.claim(found).tolist() == [True, True, True, True, False, True, True, False]
    assert (pool.used, pool.dead, pool.available) == (6, 4, 2)
    assert not set(pool.take(9).tolist()) & set(found.tolist())
    assert (pool.rows(1) != NO_ROW).all()


def test_a_claim_past_the_limit_takes_what_fits():
    pool = SegmentPool(MAXIMUM, PER_SEGMENT)
    pool.set_limit(4)
    assert pool.claim(u32(16, 17, 21, 0)).tolist() == [True, True, False, True]
    assert (pool.used, pool.backed, pool.available) == (3, 3, 1)


@given(st.integers(0, 1 << 40), st.sampled_from([8192, 20480, 1 << 20, 64 << 20]))
def test_the_slots_of_a_cap_fit_it_and_one_more_would_not(cap, stride):
    slots = slots_within(cap, stride)
    assert bytes_for(slots, stride) <= cap < bytes_for(slots + 1, stride)


@given(st.integers(1, 1 << 30), st.integers(1, 1 << 16))
def test_small_tiers_have_segments_enough_and_large_ones_full_segments(limit, per_segment):
    size = segment_slots(limit, per_segment)
    assert 1 <= size <= per_segment
    assert limit // size >= min(limit, 8)
    assert -(-limit // size) <= most_segments(limit, per_segment)
    assert most_segments(limit, per_segment) <= most_segments(limit + 1, per_segment)
    if limit >= 64 * per_segment:
        assert size == per_segment


def test_a_full_segment_is_256_mib_or_one_slot():
    assert slots_per_segment(1 << 20) << 20 == SEGMENT_BYTES == 256 << 20
    assert slots_per_segment(1 << 30) == 1


@given(
    st.lists(st.integers(0, MAXIMUM + 20), max_size=120),
    st.integers(0, MAXIMUM),
    st.lists(st.integers(0, MAXIMUM - 1), max_size=30),
)
def test_whole_segments_are_claimed_as_one_by_one(slots, limit, later):
    pools = []
    for whole in (True, False):
        pool = SegmentPool(MAXIMUM, PER_SEGMENT)
        pool.set_limit(limit)
        if not whole:
            pool._claim_whole = lambda *_: 0
        answers = [pool.claim(u32(*some)).tolist() for some in (slots, later)]
        books = [getattr(pool, name).tolist() for name in ("_state", "_size", "_live", "_opened")]
        pools.append((answers, books, pool._taken.tolist(), pool._cursor.tolist(), pool._holes))
        pools[-1] += (pool.used, pool.backed, pool.available)
    assert pools[0] == pools[1]
