"""A short soak of a real agent: half an hour of it is `make soak`."""

from __future__ import annotations

from pathlib import Path

import pytest
from soak.process import Sample, Soak, soak


def of(residents: list[int], descriptors: list[int]) -> Soak:
    both = zip(residents, descriptors, strict=True)
    seen = Soak([Sample(i, 2 * r, d, own=r) for i, (r, d) in enumerate(both)])
    seen.judge()
    return seen


def test_growth_is_seen_and_a_step_at_the_start_is_not() -> None:
    steady, growing = [50] * 20 + [100] * 30, [1000 + 10 * i for i in range(50)]
    flat, leaking = [20] * 50, [20] * 40 + [21] * 10
    assert of(steady, flat).problems == []
    assert of(growing, flat).problems == ["memory of its own grew by 14.9%"]
    assert of(steady, leaking).problems == ["1 more descriptors are open"]


@pytest.mark.timeout(300)
def test_an_agent_under_traffic_holds_nothing_when_it_is_at_rest(tmp_path: Path) -> None:
    """Too short to say anything of growth: tiers are still filling."""
    seen = soak(tmp_path, seconds=10, seed=1, speed=None)
    late = {x for x in seen.problems if "memory of its own" in x or "descriptors are open" in x}
    assert set(seen.problems) - late == set()
    assert seen.killed_clients > 0
    assert len(seen.samples) > 10


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_agent_does_not_grow(tmp_path: Path) -> None:
    seen = soak(tmp_path, seconds=240, seed=2)
    assert [x for x in seen.problems if "memory of its own" not in x] == []
    assert seen.drift < 0.05, "half an hour may grow by 2 %; four minutes still find new memory"
    assert seen.hits > 0
