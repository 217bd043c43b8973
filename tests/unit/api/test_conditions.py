"""Conditions keep the time of their last change, and reasons say what to do."""

import string

import pytest
from kvtier_api.conditions import (
    MAX_MESSAGE,
    Condition,
    find,
    is_true,
    parse_timestamp,
    timestamp,
    with_condition,
)
from kvtier_api.reasons import Reason


def test_time_moves_only_when_status_changes() -> None:
    first = with_condition((), "Ready", "False", Reason.Starting, "starting", now=100.9)
    same = with_condition(first, "Ready", "False", Reason.NoPolicy, "none", now=200.0)
    other = with_condition(same, "Ready", "True", Reason.InForce, "yes", now=300.0, generation=4)
    assert [c.last_transition_time for c in (*first, *same, *other)] == [
        timestamp(100),
        timestamp(100),
        timestamp(300),
    ]
    assert same[0].reason == "NoPolicy"
    assert other[0].observed_generation == 4
    assert is_true(other, "Ready")
    assert not is_true(other, "Stalled")


def test_types_keep_their_place() -> None:
    conditions: tuple[Condition, ...] = ()
    for name in ("Ready", "Clamped", "Stalled"):
        conditions = with_condition(conditions, name, "False", Reason.Starting, "", now=0)
    conditions = with_condition(conditions, "Clamped", "True", Reason.MemoryLimit, "", now=0)
    assert [c.type for c in conditions] == ["Ready", "Clamped", "Stalled"]
    assert find(conditions, "Clamped") == conditions[1]


def test_a_long_message_is_cut_to_what_the_api_takes() -> None:
    condition = with_condition((), "Ready", "False", Reason.Unhealthy, "x" * 5000, now=0)[0]
    assert len(condition.message) == MAX_MESSAGE
    assert condition.message.endswith("…")


def test_times_are_rfc_3339_in_utc() -> None:
    assert timestamp(0) == "1970-01-01T00:00:00Z"
    assert parse_timestamp("2026-11-30T01:02:03Z") == parse_timestamp("2026-11-30T02:02:03+01:00")
    assert parse_timestamp(timestamp(1.9)) == 1.0


@pytest.mark.parametrize("reason", list(Reason), ids=str)
def test_every_reason_is_itself_and_says_what_to_do(reason: Reason) -> None:
    assert reason.name == reason.value == str(reason)
    assert Reason[reason.value] is reason
    assert reason.about.runbook.endswith((".", "?"))
    assert reason.about.message
    fields = {name for _, name, _, _ in string.Formatter().parse(reason.about.message) if name}
    said = reason.say(**{name: f"<{name}>" for name in fields})
    assert all(f"<{name}>" in said for name in fields)
    assert "{" not in said
    Condition(  # the words fit the API's pattern
        type="Ready",
        status="True",
        reason=reason,
        message=said,
        last_transition_time=timestamp(0),
    )


def test_a_message_without_its_fields_is_an_error() -> None:
    with pytest.raises(KeyError):
        Reason.InForce.say()
