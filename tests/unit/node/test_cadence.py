"""When a status is written, and how long a failure waits."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from kvtier_agent.node import backoff
from kvtier_agent.node.cadence import SHORTEST_SECONDS, Cadence, next_write, urgent_part


def test_the_first_status_is_written_at_once() -> None:
    assert next_write(Cadence(), "x", 10.0, now=5.0) <= 0


def test_counters_wait_for_the_interval() -> None:
    c = Cadence().wrote("x", 100.0)
    assert next_write(c, "x", 10.0, now=104.0) == 6.0
    assert next_write(c, "x", 10.0, now=110.0) <= 0


def test_what_somebody_waits_for_is_written_at_once_but_a_second_apart() -> None:
    c = Cadence().wrote("x", 100.0)
    assert next_write(c, "y", 10.0, now=100.2) == 100.0 + SHORTEST_SECONDS - 100.2
    assert next_write(c, "y", 10.0, now=101.0) <= 0


def test_a_failure_waits_and_loses_nothing() -> None:
    c = Cadence().wrote("x", 100.0).failed(101.0, wait=4.0)
    assert next_write(c, "y", 10.0, now=104.0) == 1.0
    assert next_write(c, "y", 10.0, now=105.0) <= 0


def test_figures_are_not_urgent() -> None:
    def status(**more: object) -> dict[str, object]:
        return {
            "observedGeneration": 3,
            "revision": "r",
            "tiers": [{"name": "hbm", "usedBytes": 0}],
            "conditions": [
                {"type": "Clamped", "status": "True", "reason": "R", "message": "1Gi of 2Gi"}
            ],
            **more,
        }

    plain = urgent_part(status())
    assert plain == urgent_part(
        status(
            lastReportTime="2026-01-01T00:00:00Z",
            counters={"hitsL0": 5},
            tiers=[{"name": "hbm", "usedBytes": 1}],
        )
    )
    assert plain != urgent_part(status(revision="s"))
    assert plain != urgent_part(status(notApplied=["tiers.hbm"]))
    assert plain != urgent_part(status(conditions=[]))
    assert plain != urgent_part(status(tiers=[])), "a table without its figures looks broken"


@given(
    changes=st.lists(st.tuples(st.floats(0.01, 5), st.integers(0, 3)), min_size=1, max_size=200),
    interval=st.floats(10, 100),
)
def test_writes_are_bounded_whatever_changes(
    changes: list[tuple[float, int]], interval: float
) -> None:
    cadence, now, writes = Cadence(), 0.0, []
    for passes, urgent in changes:
        now += passes
        if next_write(cadence, urgent, interval, now) <= 0:
            cadence = cadence.wrote(urgent, now)
            writes.append(now)
    assert all(b - a >= SHORTEST_SECONDS - 1e-6 for a, b in pairwise(writes))


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_backoff_grows_is_bounded_and_never_zero(failures: int, chance: float) -> None:
    wait = backoff.delay(failures, chance)
    assert backoff.FIRST_SECONDS / 2 <= wait <= backoff.LONGEST_SECONDS
    assert backoff.delay(failures, 0.999) >= backoff.delay(failures, 0.0)
