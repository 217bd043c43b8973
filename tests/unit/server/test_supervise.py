"""A background loop that dies or hangs is seen, named, and started again."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from kvtier_agent.supervise import (
    FIRST_BACKOFF_SECONDS,
    LAST_BACKOFF_SECONDS,
    Heart,
    Supervisor,
    back_off,
)


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    one = Supervisor(recover_seconds=0.05)
    yield one
    for name in one.names():
        one.revive(name)
    one.stop(2)


def until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return False


def turning(heart: Heart) -> None:
    while not heart.wait(0.01):
        pass


def test_a_loop_that_beats_is_healthy_and_stops_when_asked(supervisor: Supervisor) -> None:
    supervisor.start("turning", turning)
    assert until(lambda: supervisor.health()[0].beat_age_seconds < 1)
    assert supervisor.causes() == []
    assert supervisor.stop(2) == []
    assert supervisor.names() == []


def test_a_loop_that_raises_is_red_with_its_name_and_error_and_comes_back(
    supervisor: Supervisor,
) -> None:
    runs: list[int] = []
    proceed = threading.Event()

    def fragile(heart: Heart) -> None:
        runs.append(1)
        if len(runs) == 1:
            raise RuntimeError("the drive said no")
        proceed.wait(5)
        turning(heart)

    supervisor.start("fragile", fragile)
    assert until(lambda: bool(supervisor.causes()))
    assert supervisor.causes()[0].startswith("fragile: ")
    assert "RuntimeError: the drive said no" in supervisor.causes()[0]
    assert until(lambda: len(runs) == 2)
    proceed.set()
    assert until(lambda: supervisor.causes() == [])
    assert supervisor.health()[0].restarts == 1


def test_a_loop_that_returns_unasked_is_dead_too(supervisor: Supervisor) -> None:
    supervisor.start("short", lambda heart: None)
    assert until(lambda: any("without being asked" in c for c in supervisor.causes()))


def test_a_loop_that_exits_the_interpreter_is_only_a_dead_loop(supervisor: Supervisor) -> None:
    def leaving(heart: Heart) -> None:
        raise SystemExit(3)

    supervisor.start("leaving", leaving)
    assert until(lambda: any("SystemExit" in c for c in supervisor.causes()))


def test_a_loop_without_a_beat_for_five_seconds_is_stuck() -> None:
    clock = Clock()
    supervisor = Supervisor(clock)
    release = threading.Event()
    supervisor.start("hanging", lambda heart: bool(release.wait(10)))
    assert until(lambda: supervisor.health()[0].cause == "")
    clock.now += 4.9
    assert supervisor.causes() == []
    clock.now += 0.2
    assert supervisor.causes() == ["hanging: stuck: no sign of life for 5.1 s"]
    release.set()
    supervisor.stop(2)


def test_a_killed_loop_is_started_again(supervisor: Supervisor) -> None:
    supervisor.start("victim", turning)
    supervisor.kill("victim")
    assert until(lambda: supervisor.health()[0].restarts == 1)
    assert until(lambda: supervisor.causes() == [])


def test_a_loop_killed_for_good_stays_red_until_it_is_revived(supervisor: Supervisor) -> None:
    supervisor.start("victim", turning)
    supervisor.kill("victim", hold=True)
    assert until(lambda: supervisor.health()[0].restarts >= 2)
    assert "victim: died: LoopKilledError" in supervisor.causes()[0]
    supervisor.revive("victim")
    assert until(lambda: supervisor.causes() == [])


def test_the_back_off_doubles_while_a_loop_dies_at_once() -> None:
    waits = list(itertools.accumulate(range(12), lambda wait, _: back_off(wait, 0.0), initial=0.0))
    assert waits[1:5] == [FIRST_BACKOFF_SECONDS * factor for factor in (1, 2, 4, 8)]
    assert waits[-1] == LAST_BACKOFF_SECONDS
    assert back_off(LAST_BACKOFF_SECONDS, lived=3600.0) == FIRST_BACKOFF_SECONDS


def test_a_loop_that_dies_at_once_is_started_again_and_again(supervisor: Supervisor) -> None:
    starts: list[float] = []

    def hopeless(heart: Heart) -> None:
        starts.append(time.monotonic())
        raise ValueError("again")

    supervisor.start("hopeless", hopeless)
    assert until(lambda: len(starts) >= 3)
    assert "ValueError: again" in supervisor.causes()[0]


def test_two_loops_cannot_have_one_name(supervisor: Supervisor) -> None:
    supervisor.start("twin", turning)
    with pytest.raises(ValueError, match="twin"):
        supervisor.start("twin", turning)


def test_a_loop_that_does_not_stop_is_named() -> None:
    supervisor = Supervisor()
    release = threading.Event()
    supervisor.start("stubborn", lambda heart: bool(release.wait(10)))
    assert supervisor.stop(0.1) == ["stubborn"]
    release.set()
    assert supervisor.stop(2) == []
