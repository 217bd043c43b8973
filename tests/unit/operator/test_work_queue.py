"""The work queue: what is handed out, when, and what never is."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_operator.runtime.queue import QueueLimits, QueueState, WorkQueue


def queue(**limits: float) -> QueueState[str]:
    return QueueState(
        QueueLimits(**limits),  # type: ignore[arg-type]
        urgent=lambda key: key.startswith("policy"),
        random=lambda: 0.5,
    )


def test_a_key_that_waits_is_not_added_twice() -> None:
    q = queue()
    for _ in range(10):
        q.add("a", 0.0)
    assert q.take(0.0) == "a"
    q.done("a", 0.0)
    assert q.take(0.0) is None


def test_a_key_added_while_busy_comes_again_afterwards() -> None:
    q = queue()
    q.add("a", 0.0)
    assert q.take(0.0) == "a"
    q.add("a", 0.0)
    assert q.take(0.0) is None
    q.done("a", 1.0)
    assert q.take(1.0) == "a"


def test_the_earliest_wish_wins() -> None:
    q = queue()
    q.add("a", 0.0, after=10.0)
    q.add("a", 0.0, after=5.0)
    q.add("a", 0.0, after=20.0)
    assert q.take(4.9) is None
    assert q.next_wakeup(4.0) == 1.0
    assert q.take(5.0) == "a"
    q.done("a", 5.0)
    assert q.take(100.0) is None


def test_back_off_doubles_has_a_ceiling_and_is_forgotten() -> None:
    q = queue(retry_base=1.0, retry_max=8.0)
    now, delays = 0.0, []
    q.add("a", now)
    for _ in range(6):
        assert q.take(now) == "a"
        delays.append(q.failed("a", now))
        now += delays[-1]
    assert delays == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    assert q.take(now) == "a"
    q.done("a", now)
    q.add("a", now)
    assert q.take(now) == "a"
    assert q.failed("a", now) == 1.0


def test_jitter_spreads_retries() -> None:
    values = iter([0.0, 0.999])
    q: QueueState[str] = QueueState(
        QueueLimits(retry_base=1.0), lambda _: False, lambda: next(values)
    )
    for key in ("a", "b"):
        q.add(key, 0.0)
        q.take(0.0)
    assert q.failed("a", 0.0) == 0.5
    assert q.failed("b", 0.0) == pytest.approx(1.499)


def test_events_do_not_make_a_failing_key_spin() -> None:
    q = queue(retry_base=1.0)
    q.add("a", 0.0)
    q.take(0.0)
    q.failed("a", 0.0)
    q.add("a", 0.1)
    assert q.take(0.5) is None
    assert q.take(1.0) == "a"


def test_the_server_may_ask_for_more_time() -> None:
    q = queue(retry_base=0.1)
    q.add("a", 0.0)
    q.take(0.0)
    assert q.failed("a", 0.0, at_least=7.0) == 7.0
    assert q.take(6.9) is None


def test_after_an_outage_what_failed_is_due_at_once() -> None:
    q = queue(retry_base=10.0)
    q.add("a", 0.0)
    q.take(0.0)
    q.failed("a", 0.0)
    q.add("later", 0.0, after=50.0)
    q.hurry(1.0)
    assert q.take(1.0) == "a"
    assert q.take(1.0) is None
    assert q.failures("a") == 0


def test_policies_go_before_nodes() -> None:
    q = queue()
    for i in range(100):
        q.add(f"node-{i}", 0.0)
    q.add("policy-x", 0.0)
    assert q.take(0.0) == "policy-x"
    assert q.take(0.0) == "node-0"


def test_the_rate_is_bounded() -> None:
    q = queue(rate=10.0, burst=5)
    for i in range(20):
        q.add(f"k{i}", 0.0)
    assert sum(q.take(0.0) is not None for _ in range(20)) == 5
    assert q.next_wakeup(0.0) == pytest.approx(0.1)
    assert sum(q.take(1.0) is not None for _ in range(20)) == 5


def test_a_key_whose_object_is_gone_is_forgotten() -> None:
    q = queue()
    q.add("a", 0.0, after=5.0)
    q.forget("a")
    assert q.take(10.0) is None
    assert q.next_wakeup(10.0) is None


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "later", "take", "done", "failed"]),
            st.sampled_from(["policy", "n1", "n2"]),
        ),
        max_size=60,
    )
)
def test_no_key_runs_twice_at_once_and_none_is_lost(steps: list[tuple[str, str]]) -> None:
    q = queue(retry_base=1.0, retry_max=2.0)
    now, running, owed = 0.0, set[str](), set[str]()
    for what, key in steps:
        now += 0.25
        if what in ("add", "later"):
            q.add(key, now, after=0.0 if what == "add" else 3.0)
            owed.add(key)
        elif what == "take":
            taken = q.take(now)
            if taken is not None:
                assert taken not in running
                running.add(taken)
                owed.discard(taken)
        elif key in running:
            running.discard(key)
            if what == "done":
                q.done(key, now)
            else:
                q.failed(key, now)
                owed.add(key)
    for key in running:
        q.done(key, now)
    seen = set()
    while (taken := q.take(now + 1000.0)) is not None:
        seen.add(taken)
    assert owed <= seen


async def test_a_taker_that_waits_is_woken() -> None:
    q: WorkQueue[str] = WorkQueue(queue(), asyncio.get_running_loop().time)
    waiting = asyncio.create_task(q.take())
    await asyncio.sleep(0)
    q.add("a")
    assert await asyncio.wait_for(waiting, 5.0) == "a"
    q.add("b", after=0.02)
    assert await asyncio.wait_for(q.take(), 5.0) == "b"
