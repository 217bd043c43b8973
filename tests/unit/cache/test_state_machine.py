"""The whole cache against a plain model. The machine is in `tools/soak`, long runs `make soak`."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from soak.machine import CacheMachine, UnitsMachine, drive

COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("machine", [CacheMachine, UnitsMachine])
def test_random_calls_never_serve_a_wrong_byte_or_leak(machine):
    run_state_machine_as_test(
        machine, settings=settings(max_examples=15, stateful_step_count=40, **COMMON)
    )


@pytest.mark.timeout(300)
def test_a_long_life_meets_every_event_and_stays_right():
    """Nothing is asserted here that `drive` does not assert at each step, but that it was worth
    it: everything that the cache counts has happened."""
    total: Counter[str] = Counter(dict.fromkeys(drive(0, 0), 0))
    told_by_the_server = {"misses", "miss_tokens"}
    by_the_scrub = {"scrubbed_pages", "scrub_bad_pages"}  # `tests/unit/storage/test_scrub.py`
    by_power_cuts = {"unwritten_pages"}  # `tests/unit/storage/test_unwritten_pages.py`
    by_less_room = {"dropped_found_pages"}  # `tests/unit/storage/test_core_changes.py`
    never: set[str] = set()
    for seed in range(15):  # mostly five are enough; what is rare depends on every step before
        total.update(drive(seed, 600))
        never = {name for name, count in total.items() if not count}
        never -= told_by_the_server | by_the_scrub | by_power_cuts | by_less_room
        if seed >= 4 and not never:
            break
    assert not never
    assert total["restarts"] > 3


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(100, 115))
def test_more_long_lives_stay_right(seed):
    assert drive(seed, 2000)["committed"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("machine", [CacheMachine, UnitsMachine])
def test_many_random_calls_never_serve_a_wrong_byte_or_leak(machine):
    run_state_machine_as_test(
        machine, settings=settings(max_examples=400, stateful_step_count=80, **COMMON)
    )
