"""The classic value model: its equations, the gate, the measured costs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_agent.value import classic
from kvtier_agent.value.costs import DEFAULTS, ENOUGH, CostModel
from kvtier_agent.value.gate import decide, decide_by_counts

seconds = st.lists(st.floats(0, 10, allow_nan=False), min_size=0, max_size=30)


def test_the_worked_examples_of_the_docstring():
    p = classic.reuse_probability(np.array([2.0, 20.0]), 0.3, 4)
    # put once: one access without reuse
    assert p == pytest.approx([(1.2 + 2) / 7, (1.2 + 20) / 25])
    recompute = classic.recompute_seconds(np.array([0.0]), 512, 20_000, 30_500)
    assert recompute[0] == pytest.approx(0.0258, rel=0.01)
    load = classic.load_seconds(16 << 20, 10e9, 20e-6, 1 << 20)
    assert load == pytest.approx(0.0020, rel=0.01)
    vd = classic.density(0.3, recompute, load, 16 << 20)
    assert vd[0] == pytest.approx(359, rel=0.01)


def test_overhead_counts_each_started_transfer():
    assert classic.load_seconds(1, 1e9, 1.0, 4096) == pytest.approx(1.0)
    assert classic.load_seconds(4097, 1e9, 1.0, 4096) == pytest.approx(2.0, rel=1e-4)


def test_deeper_pages_cost_more_to_recompute():
    cost = classic.recompute_seconds(np.array([0.0, 30_500.0]), 2, 1000, 30_500)
    assert cost[1] / cost[0] == pytest.approx(2.0, rel=1e-3)


def test_no_threshold_admits_even_a_loss_and_a_threshold_is_inclusive():
    vd = np.array([-5.0, 10.0, 9.9])
    assert classic.admitted(vd, 0).all()
    assert classic.admitted(vd, 10).tolist() == [False, True, False]


class TestGate:
    def test_loads_all_when_loading_is_cheap(self):
        answer = decide(np.full(5, 0.01), np.full(5, 0.1), 0.1, 0.8)
        assert (answer.load, answer.reason) == (5, "hit")

    def test_recomputes_when_loading_is_slower(self):
        answer = decide(np.full(5, 0.2), np.full(5, 0.1), 0.0, 0.8)
        assert (answer.load, answer.reason) == (0, "slower")

    def test_takes_the_prefix_that_pays(self):
        load = np.array([0.01, 0.01, 0.5, 0.5])
        assert decide(load, np.full(4, 0.1), 0.0, 0.8).load == 2

    def test_a_load_that_would_break_an_slo_that_recompute_keeps_is_not_taken(self):
        assert decide(np.array([2.0]), np.array([0.5]), 0.0, 0.8).load == 0

    def test_nothing_is_loaded_when_no_way_keeps_the_slo(self):
        answer = decide(np.full(3, 0.5), np.full(3, 2.0), 5.0, 0.8)
        assert (answer.load, answer.reason) == (0, "slo-lost")

    def test_without_an_slo_the_fastest_way_is_taken(self):
        answer = decide(np.full(3, 0.5), np.full(3, 2.0), 5.0, np.inf)
        assert (answer.load, answer.reason) == (3, "hit")

    def test_nothing_found(self):
        assert decide(np.empty(0), np.empty(0), 9.0, 0.8).reason == "miss"

    @given(seconds, st.floats(0, 10), st.floats(0.01, 10))
    def test_never_slower_than_recompute_and_loads_only_what_keeps_the_slo(self, load, rest, slo):
        load = np.array(load)
        recompute = load[::-1].copy()
        answer = decide(load, recompute, rest, slo)
        total = [
            load[:n].sum() + recompute[n:].sum() + rest for n in range(len(load) + 1)
        ]  # fmt: skip
        assert total[answer.load] <= total[0] + 1e-9
        if answer.load:
            assert total[answer.load] <= slo + 1e-9


class TestCosts:
    def feed(self, bandwidth, overhead, count=60, pages=(1, 4, 16, 64), page=1 << 20):
        model = CostModel()
        for i in range(count):
            n = pages[i % len(pages)]
            model.measured("l2->l1", n, page, n * page / bandwidth + overhead * n)
        return model

    def test_defaults_hold_until_there_is_enough(self):
        model = CostModel()
        for _ in range(ENOUGH - 1):
            model.measured("l2->l1", 1, 1 << 20, 1.0)
        assert model.cost("l2->l1") == DEFAULTS["l2->l1"]

    def test_the_time_of_a_page_is_learned(self):
        model = self.feed(3e9, 50e-6)
        expected = (1 << 20) / 3e9 + 50e-6
        assert model.cost("l2->l1").seconds(1 << 20, 1 << 20) == pytest.approx(expected, rel=0.05)

    def test_bandwidth_and_overhead_are_told_apart_by_sizes(self):
        model = CostModel()
        for i in range(100):
            page = (64 << 10, 1 << 20)[i % 2]
            model.measured("l1->l2", 8, page, 8 * (page / 1e9 + 200e-6))
        cost = model.cost("l1->l2")
        assert cost.bandwidth == pytest.approx(1e9, rel=0.05)
        assert cost.overhead == pytest.approx(200e-6, rel=0.05)

    def test_one_stall_is_not_believed_a_slow_drive_is(self):
        model = self.feed(3e9, 50e-6)
        before = model.cost("l2->l1").seconds(1 << 20, 1 << 20)
        model.measured("l2->l1", 64, 1 << 20, 100.0)
        assert model.cost("l2->l1").seconds(1 << 20, 1 << 20) < 3 * before
        for _ in range(200):
            model.measured("l2->l1", 16, 1 << 20, 16 * 20 * before)
        slow = model.cost("l2->l1").seconds(1 << 20, 1 << 20)
        assert slow == pytest.approx(20 * before, rel=0.2)

    def test_nonsense_is_ignored(self):
        model = CostModel()
        for _ in range(50):
            model.measured("l2->l1", 0, 1 << 20, 1.0)
            model.measured("l2->l1", 1, 1 << 20, 0.0)
        assert model.cost("l2->l1") == DEFAULTS["l2->l1"]

    def test_from_l2_costs_both_legs(self):
        model = CostModel()
        assert model.load_seconds(2, 1 << 20) > model.load_seconds(1, 1 << 20)
        assert model.load_seconds(1, 1 << 20) > model.load_seconds(0, 1 << 20)


def test_the_short_way_to_the_gate_is_the_long_one_wherever_it_answers():
    rng = np.random.default_rng(11)
    answered = 0
    for _ in range(2000):
        tiers = rng.integers(0, 3, rng.integers(0, 6))
        load = rng.integers(1, 9, 3) / 4
        recompute = np.sort(rng.integers(4, 16, tiers.size)) / 4
        rest, slo = rng.integers(0, 3) / 4, rng.integers(1, 20) / 4
        first = float(recompute[0]) if tiers.size else 1.0
        counts = np.bincount(tiers, minlength=3).tolist()
        short = decide_by_counts(counts, load.tolist(), first, float(rest), float(slo))
        if short is not None:
            answered += 1
            assert short == decide(load[tiers], recompute, float(rest), float(slo))
    assert answered > 500
