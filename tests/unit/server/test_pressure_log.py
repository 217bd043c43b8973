"""Pressure is told: a line in the log for each rise, whatever happened between two looks."""

from __future__ import annotations

from kvtier_agent.server.pressure_log import PressureLog
from structlog.testing import capture_logs


def test_each_rise_is_one_warning_that_names_the_line_and_the_figures() -> None:
    pressure = PressureLog()
    with capture_logs() as lines:
        pressure.look("default", {"tightened": 0, "demote_all": 0}, 10, 100)
        pressure.look("default", {"tightened": 1, "demote_all": 0}, 95, 100)
        pressure.look("default", {"tightened": 1, "demote_all": 0}, 95, 100)
        pressure.look("default", {"tightened": 3, "demote_all": 1}, 97, 100)
        pressure.look("other", {"tightened": 1, "demote_all": 0}, 5, 6)
    told = [(line["domain"], line["event"].split(":")[0], line["times"]) for line in lines]
    assert told == [
        ("default", "L0 rose above pressure.tightenPercent", 1),
        ("default", "L0 rose above pressure.demotePercent", 1),
        ("default", "L0 rose above pressure.tightenPercent", 2),
        ("other", "L0 rose above pressure.tightenPercent", 1),
    ]
    assert all(line["log_level"] == "warning" for line in lines)
    assert lines[0]["used_bytes"] == 95
