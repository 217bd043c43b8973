"""Latency histograms: Prometheus' buckets are cumulative, percentiles are close."""

from __future__ import annotations

import random

import pytest
from kvtier_agent.server.latency import BOUNDS, Latency


def test_buckets_are_cumulative_and_count_everything() -> None:
    latency = Latency()
    for seconds in (0.0005, 0.001, 0.002, 0.02, 0.2, 7.0):
        latency.observe(seconds, 10)
    assert BOUNDS == (0.001, 0.005, 0.01, 0.05, 0.1, 0.5)
    assert latency.buckets == [2, 3, 3, 4, 4, 5, 6]
    assert latency.count == 6
    assert latency.bytes == 60


def test_percentiles_are_at_most_a_tenth_too_high() -> None:
    rng = random.Random(1)
    values = sorted(rng.lognormvariate(-7, 1.5) for _ in range(5000))
    latency = Latency()
    for value in values:
        latency.observe(value, 1)
    for percent in (50, 90, 99):
        exact = values[int(len(values) * percent / 100) - 1]
        found = latency.percentile(percent)
        assert found is not None
        assert exact <= found * 1.0001
        assert found <= exact * 1.1001


def test_without_anything_seen_there_is_no_percentile() -> None:
    assert Latency().percentile(99) is None


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 1e6])
def test_extremes_stay_in_the_table(seconds: float) -> None:
    latency = Latency()
    latency.observe(seconds, 1)
    assert latency.percentile(50) is not None
