"""What rounds come to, and which way a ratio goes."""

from __future__ import annotations

import json

import pytest
from kvtier_agent.bench.figures import Figure, Report, Spread, alternate, quantile


def figure(ours: float, baseline: float | None, *, more_is_better: bool) -> Figure:
    theirs = None if baseline is None else Spread.of([baseline])
    return Figure("x", Spread.of([ours]), theirs, "other", "u", more_is_better)


def test_a_ratio_above_one_is_ours_for_throughput_and_latency_alike() -> None:
    assert figure(6.0, 3.0, more_is_better=True).ratio == 2.0
    assert figure(0.001, 0.002, more_is_better=False).ratio == 2.0
    assert figure(0.004, 0.002, more_is_better=False).ratio == 0.5


def test_without_a_baseline_there_is_no_ratio() -> None:
    shown = figure(1.0, None, more_is_better=True).as_json()
    assert shown["ratio"] is None
    assert shown["baseline"] is None
    assert shown["baseline_range"] is None
    assert shown["baseline_name"] == "other"


def test_the_median_counts_and_the_range_is_told() -> None:
    shown = Figure(
        "x", Spread.of([9.0, 1.0, 3.0]), Spread.of([1.0]), "other", "u", True, {"p99_seconds": 0.25}
    ).as_json()
    assert (shown["ours"], shown["ours_range"]) == (3.0, [1.0, 9.0])
    assert shown["extra"] == {"p99_seconds": 0.25}


def test_no_rounds_are_no_figure() -> None:
    with pytest.raises(ValueError, match="no rounds"):
        Spread.of([])


def test_the_order_of_the_sides_alternates() -> None:
    seen: list[str] = []

    def side(name: str) -> float:
        seen.append(name)
        return float(len(seen))

    ours, theirs = alternate(3, lambda: side("ours"), lambda: side("theirs"))
    assert seen == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert ours == [1.0, 4.0, 5.0]
    assert theirs == [2.0, 3.0, 6.0]


@pytest.mark.parametrize(
    ("share", "wanted"), [(0.0, 1.0), (0.5, 50.0), (0.99, 99.0), (0.991, 100.0), (1.0, 100.0)]
)
def test_a_quantile_is_a_value_that_was_seen(share: float, wanted: float) -> None:
    assert quantile([float(i) for i in range(100, 0, -1)], share) == wanted


def test_a_report_is_the_contract() -> None:
    report = Report((figure(2.0, 1.0, more_is_better=True),), {"rounds": 1}, {"a": "1"}, {})
    shown = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert {"results", "settings", "versions"} <= shown.keys()
    assert {"name", "ratio", "ours", "baseline", "baseline_name", "unit"} <= shown["results"][
        0
    ].keys()
    assert "ratio 2.000" in report.as_text()
