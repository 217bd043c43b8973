"""Slots, the LRU log, water marks, admission: the small rules."""

import numpy as np
import pytest
from kvtier_agent.cache import admission
from kvtier_agent.cache.pressure import Level, RecentValue, lines
from kvtier_agent.cache.replacement import TouchLog, cooled_down
from kvtier_agent.cache.slots import SlotPool


def u32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint32)


class TestSlots:
    def test_lowest_first_and_never_twice(self):
        pool = SlotPool(100)
        assert pool.missing(10).tolist() == list(range(10))
        pool.set_limit(10)
        first, second = pool.take(4), pool.take(99)
        assert first.tolist() == [0, 1, 2, 3]
        assert len(second) == 6
        assert pool.take(1).size == 0
        pool.give(first)
        with pytest.raises(AssertionError, match="not taken"):
            pool.give(first)

    def test_a_shrink_gives_free_memory_back_and_waits_for_the_rest(self):
        pool = SlotPool(100)
        pool.set_limit(10)
        used = pool.take(8)
        pool.set_limit(4)
        assert pool.take_punches().size == 2
        assert pool.take(1).size == 0
        pool.give(used[:3])
        assert pool.used == 5
        assert pool.free_count == 0
        pool.give(used[3:])
        assert pool.used + pool.free_count == 4
        assert pool.take_punches().size == 4

    def test_a_growth_uses_holes_only_when_they_are_punched(self):
        pool = SlotPool(10)
        pool.set_limit(10)
        pool.set_limit(4)
        holes = pool.take_punches()
        assert pool.missing(10).size == 0
        pool.set_limit(10)
        assert pool.free_count == 4
        pool.punched(holes)
        assert sorted(pool.missing(10).tolist()) == sorted(holes.tolist())
        pool.set_limit(10)
        assert pool.free_count == 10


class TestOrder:
    def test_coldest_first_and_touched_pages_move(self):
        touch = np.zeros(10, dtype=np.uint64)
        log = TouchLog()

        def stamp(rows, at):
            stamps = np.arange(at, at + len(rows), dtype=np.uint64)
            touch[rows] = stamps
            log.append(rows, stamps)

        def valid(rows, stamps):
            return touch[rows] == stamps

        stamp(u32(0, 1, 2, 3), 1)
        stamp(u32(1), 10)
        assert log.pop(2, valid).tolist() == [0, 2]
        log.push_cold(u32(2), touch[u32(2)])
        assert log.pop(9, valid).tolist() == [2, 3, 1]
        assert log.entries == 0

    def test_compaction_drops_only_what_is_stale(self):
        touch = np.zeros(4, dtype=np.uint64)
        log = TouchLog()
        for at in range(1, 6001):
            row = u32(at % 4)
            touch[row] = at
            log.append(row, np.array([at], dtype=np.uint64))
        log.compact(4, lambda rows, stamps: touch[rows] == stamps)
        assert log.entries == 4
        assert log.pop(9, lambda rows, stamps: touch[rows] == stamps).tolist() == [1, 2, 3, 0]

    def test_cool_down(self):
        at = np.array([0.0, 1.0, 7.0])
        assert cooled_down(at, 8.0, 5.0).tolist() == [True, True, False]


class TestPressure:
    @pytest.mark.parametrize("capacity", [1, 2, 3, 7, 10, 100, 12345])
    def test_the_lines_are_in_order_at_every_size(self, capacity):
        found = lines(capacity, 90, 95)
        assert 0 <= found.low <= found.high < found.tighten <= found.demote <= capacity

    def test_replacement_holds_l0_below_the_tighten_line(self):
        found = lines(1000, 90, 95)
        assert (found.low, found.high, found.tighten, found.demote) == (850, 880, 900, 950)

    def test_levels(self):
        found = lines(1000, 90, 95)
        assert found.level(900) is Level.NORMAL
        assert found.level(901) is Level.TIGHTEN
        assert found.level(951) is Level.DEMOTE

    def test_median_of_recent_admissions(self):
        recent = RecentValue()
        assert recent.median == float("-inf")
        for value in (1.0, 5.0, 9.0):
            recent.admitted(np.array([value]))
        assert recent.median == 5.0


class TestAdmission:
    def place(
        self,
        count=6,
        admits=(True, True, True),
        exempt=(),
        partial=(),
        density=None,
        median=0.0,
        room=(9, 9, 9),
    ):
        exempt_mask, partial_mask = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)
        exempt_mask[list(exempt)] = True
        partial_mask[list(partial)] = True
        masks = tuple(np.full(count, admit) for admit in admits)
        values = np.zeros(count) if density is None else np.array(density, dtype=float)
        return admission.place(
            masks, exempt_mask, partial_mask, values, median, admission.L0Room(*room)
        ).tolist()

    def test_the_head_of_the_chain_gets_l0_and_the_rest_l1(self):
        assert self.place(room=(2, 4, 5)) == [0, 0, 1, 1, 1, 1]

    def test_when_tightened_only_the_better_half_enters(self):
        placed = self.place(density=[1, 5, 2, 6, 7, 8], median=5, room=(-1, 2, 3))
        assert placed == [1, 0, 1, 0, 1, 1]

    def test_exactly_at_the_line_nothing_enters(self):
        assert self.place(density=[9] * 6, median=5, room=(0, 2, 3)) == [1] * 6

    def test_frozen_pages_take_any_free_slot(self):
        assert self.place(exempt=(0, 1, 2), room=(-5, -1, 2)) == [0, 0, 1, 1, 1, 1]

    def test_a_partial_page_is_in_l0_or_nowhere(self):
        assert self.place(partial=(5,))[5] == 0
        assert self.place(partial=(5,), room=(0, 0, 0))[5] == admission.SPACE
        assert self.place(partial=(5,), admits=(False, True, True))[5] == admission.VALUE

    def test_what_only_l2_admits_passes_through_l1(self):
        assert self.place(admits=(False, False, True)) == [1] * 6

    def test_what_nobody_admits_is_refused(self):
        assert self.place(admits=(False, False, False)) == [admission.VALUE] * 6

    def test_a_page_behind_a_hole_is_refused_too(self):
        tier = np.array([0, admission.SPACE, 1, 1], dtype=np.uint8)
        closed = admission.close_holes(tier, np.array([False, False, False, True]))
        assert closed.tolist() == [0, admission.SPACE, admission.SPACE, 1]
