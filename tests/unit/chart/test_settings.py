"""The chart knows the settings of both programs by name, type and bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chart_settings
import pytest
from kvtier_agent.settings import AgentSettings
from kvtier_operator.settings import OperatorSettings

SIZES = {"1.5Gi": 3 << 29, "64Mi": 64 << 20, "1Pi": 1 << 50}
PROGRAMS = {"agent": AgentSettings, "operator": OperatorSettings}


def test_the_committed_schema_is_that_of_the_settings_classes() -> None:
    assert chart_settings.is_current(), "run make reference"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"operator": {"settings": {"revision_histroy_limit": 20}}}, "revision_histroy_limit"),
        ({"operator": {"settings": {"revision_history_limit": 20000}}}, "revision_history_limit"),
        ({"operator": {"settings": {"revision_history_limit": 1}}}, "revision_history_limit"),
        ({"operator": {"settings": {"retry_base_seconds": 0}}}, "retry_base_seconds"),
        ({"agent": {"settings": {"typo": 3}}}, "'typo' not allowed"),
        ({"agent": {"settings": {"max_pages": "abc"}}}, "max_pages"),
        ({"agent": {"settings": {"max_pages": 1.5}}}, "max_pages"),
        ({"agent": {"settings": {"log_level": "loud"}}}, "log_level"),
        ({"agent": {"settings": {"allow_root_filesystem": "yes"}}}, "allow_root_filesystem"),
        ({"agent": {"settings": {"write_queue": "lots"}}}, "write_queue"),
        ({"agent": {"settings": {"write_queue": 1}}}, "write_queue"),
        (
            {"agent": {"settings": {"write_queue": "1023Ki"}}},
            "agent.settings.write_queue: write a size from 1Mi to 64Gi, not 1023Ki",
        ),
        (
            {"agent": {"settings": {"memory_headroom": "1.5Ti"}}},
            "agent.settings.memory_headroom: write a size from 64Mi to 1Ti, not 1.5Ti",
        ),
    ],
)
def test_a_setting_that_no_program_would_take_is_refused_by_name(
    render: Callable[..., Any], values: dict[str, Any], said: str
) -> None:
    assert said in render(values, refused=True).error


def test_settings_within_bounds_reach_the_programs(
    render: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, dict[str, Any]] = {
        "agent": {
            "max_pages": 268435456,
            "lease_seconds": 1.5,
            "write_queue": "1.5Gi",
            "compaction_rate": 0,
            "memory_headroom": "64Mi",
            "device_memory": "1Pi",
            "allow_root_filesystem": True,
            "memory_on_stop": "free",
        },
        "operator": {"revision_history_limit": 100, "retry_base_seconds": 0.5},
    }
    rendered = render({name: {"settings": settings} for name, settings in given.items()})
    for kind, name in (("DaemonSet", "agent"), ("Deployment", "operator")):
        (container,) = rendered.pods[kind]["containers"]
        for entry in container["env"]:
            monkeypatch.setenv(entry["name"], entry.get("value", "node-a"))
        read = PROGRAMS[name]()
        for setting, value in given[name].items():
            expected = SIZES.get(value, value)
            assert getattr(read, setting) == expected, setting


@pytest.mark.parametrize(
    ("program", "setting"),
    [(n, s) for n, c in PROGRAMS.items() for s in sorted(chart_settings.OF_THE_CHART[c])],
)
def test_a_setting_of_the_charts_own_is_refused_with_a_sentence(
    render: Callable[..., Any], program: str, setting: str
) -> None:
    error = render({program: {"settings": {setting: "x"}}}, refused=True).error
    assert f"{program}.settings.{setting}: the chart sets this from a value of its own" in error
