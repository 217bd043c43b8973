"""A policy comes, changes, goes and comes back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_agent.node import lifecycle
from kvtier_agent.node.desired import Absent, Desired, Unheard, Wanted
from kvtier_agent.node.lifecycle import Action, Life, Phase, step


def wanted(revision: str) -> Wanted:
    return Wanted(revision=revision, spec=None)  # type: ignore[arg-type]


GONE = Absent(grace_seconds=10.0)


def serving(revision: str = "a") -> Life:
    return lifecycle.applied(lifecycle.START, wanted(revision))


def test_silence_changes_nothing() -> None:
    for life in (lifecycle.START, serving()):
        assert step(life, Unheard(), 1e9) == (life, ())


def test_a_new_revision_is_applied_once() -> None:
    life, actions = step(lifecycle.START, wanted("a"), 0.0)
    assert actions == (Action.APPLY,)
    life = lifecycle.applied(life, wanted("a"))
    assert life.phase is Phase.SERVING
    assert step(life, wanted("a"), 1.0) == (life, ())
    assert step(life, wanted("b"), 2.0)[1] == (Action.APPLY,)


def test_a_refused_revision_leaves_the_last_good_one_and_is_not_tried_again() -> None:
    life = lifecycle.refused(serving("a"), wanted("b"))
    assert life.in_force == "a"
    assert life.phase is Phase.SERVING
    assert step(life, wanted("b"), 5.0)[1] == ()
    assert step(life, wanted("a"), 5.0)[1] == (Action.APPLY,), "going back is a change again"


def test_without_a_policy_nothing_is_admitted_and_bytes_go_after_the_grace() -> None:
    life, actions = step(serving(), GONE, 100.0)
    assert actions == (Action.STOP_ADMITTING,)
    assert life.phase is Phase.ORPHANED
    assert life.in_force == "a"
    life, actions = step(life, GONE, 109.9)
    assert actions == ()
    life, actions = step(life, GONE, 110.0)
    assert actions == (Action.DROP,)
    assert life.phase is Phase.DROPPED
    assert life.in_force is None
    assert step(life, GONE, 1e6) == (life, ())


def test_a_policy_that_comes_back_in_time_is_applied_as_if_nothing_had_been() -> None:
    orphan, _ = step(serving("a"), GONE, 0.0)
    _, actions = step(orphan, wanted("a"), 5.0)
    assert actions == (Action.APPLY,)
    back = lifecycle.applied(orphan, wanted("a"))
    assert back == serving("a")


def test_a_node_that_never_had_a_policy_has_nothing_to_drop() -> None:
    assert step(lifecycle.START, GONE, 0.0) == (lifecycle.START, ())


def test_a_restart_does_not_start_the_grace_anew() -> None:
    orphan, _ = step(serving(), GONE, 1000.0)
    left = lifecycle.remaining_grace(orphan, 1004.0)
    assert left == pytest.approx(6.0)
    again = lifecycle.resumed(left, 5.0)  # another process, another clock
    assert step(again, GONE, 10.9)[1] == ()
    assert step(again, GONE, 11.0)[1] == (Action.DROP,)
    assert lifecycle.remaining_grace(serving(), 3.0) is None
    assert lifecycle.resumed(None, 3.0) == lifecycle.START


def test_a_restart_after_the_grace_finds_it_over() -> None:
    orphan, _ = step(serving(), GONE, 0.0)
    late = lifecycle.remaining_grace(orphan, 1e6)
    assert late is not None
    assert late > 0, "it is not dropped yet"
    assert lifecycle.resumed(late, 5.0).phase is Phase.ORPHANED
    dropped, _ = step(orphan, GONE, 11.0)
    assert lifecycle.remaining_grace(dropped, 12.0) == 0
    again = lifecycle.resumed(0.0, 5.0)
    assert again == dropped
    assert step(again, GONE, 6.0) == (again, ())
    assert step(again, wanted("a"), 7.0)[1] == (Action.APPLY,)


def test_a_shorter_grace_counts_at_once() -> None:
    orphan, _ = step(serving(), Absent(grace_seconds=3600.0), 0.0)
    orphan, actions = step(orphan, Absent(grace_seconds=2.0), 1.0)
    assert actions == ()
    assert step(orphan, Absent(grace_seconds=2.0), 3.0)[1] == (Action.DROP,)


words = st.one_of(
    st.just(Unheard()),
    st.builds(Absent, grace_seconds=st.floats(0, 100)),
    st.sampled_from(["a", "b", "c"]).map(wanted),
)


@given(st.lists(st.tuples(words, st.floats(0, 50), st.booleans()), max_size=30))
def test_bytes_are_dropped_only_after_an_orphanage(
    history: list[tuple[Desired, float, bool]],
) -> None:
    life, now, orphaned = lifecycle.START, 0.0, False
    for desired, passes, works in history:
        now += passes
        before = life
        life, actions = step(life, desired, now)
        assert len(actions) <= 1
        if Action.DROP in actions:
            assert orphaned
            assert before.phase is Phase.ORPHANED
        if Action.APPLY in actions:
            assert isinstance(desired, Wanted)
            life = (lifecycle.applied if works else lifecycle.refused)(life, desired)
        orphaned = life.phase is Phase.ORPHANED
        if not isinstance(desired, Absent):
            assert step(life, desired, now) == (life, ()), "a settled state asks for nothing"
        assert (life.drop_at is not None) == orphaned
