"""What an engine reports as its prefill speed."""

import pytest
from kvtier_agent.connectors.vllm.speed import PrefillSpeed

PARITY = 30_000


def test_only_steps_with_a_page_of_tokens_count() -> None:
    speed = PrefillSpeed(256, PARITY)
    speed.begin(0.0)
    speed.end(0.01, 4, 0)
    assert speed.tokens_per_second is None
    speed.begin(1.0)
    speed.end(1.5, 1000, 0)
    assert speed.tokens_per_second == pytest.approx(2000)


def test_a_step_counts_once() -> None:
    speed = PrefillSpeed(1, PARITY)
    speed.begin(0.0)
    speed.end(1.0, 100, 0)
    speed.end(9.0, 100, 0)
    assert speed.tokens_per_second == pytest.approx(100)


def test_it_follows_the_engine_slowly() -> None:
    speed = PrefillSpeed(1, PARITY)
    for step in range(40):
        speed.begin(step)
        speed.end(step + 0.5, 1000, 0)
    assert speed.tokens_per_second == pytest.approx(2000)
    speed.begin(100.0)
    speed.end(101.0, 1000, 0)
    assert speed.tokens_per_second == pytest.approx(1700)


def test_what_was_measured_deep_in_a_prompt_is_told_as_of_its_beginning() -> None:
    speed = PrefillSpeed(1, PARITY)
    speed.begin(0.0)
    speed.end(1.0, 1000, depth=15_000)
    assert speed.tokens_per_second == pytest.approx(1500)
