"""Logs: one JSON object a line, transitions in full, repeats counted."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import structlog
from kvtier_agent.logs import BURST, REPEAT_SECONDS, Repeats


def test_repeats_are_dropped_and_counted() -> None:
    now = [0.0]
    repeats = Repeats(clock=lambda: now[0])

    def write(event: str) -> dict[str, object] | None:
        try:
            return dict(repeats(None, "warning", {"event": event}))
        except structlog.DropEvent:
            return None

    passed = [write("disk is slow") for _ in range(100)]
    assert sum(p is not None for p in passed) == BURST
    assert write("something else") == {"event": "something else"}
    now[0] += REPEAT_SECONDS
    assert write("disk is slow") == {"event": "disk is slow", "repeated": 100 - BURST}
    assert write("disk is slow") == {"event": "disk is slow"}


@pytest.mark.parametrize("form", ["json", "text"])
def test_lines_go_to_standard_error_and_so_do_those_of_libraries(form: str) -> None:
    code = f"""
import logging, structlog
from kvtier_agent import logs
logs.configure("info", {form!r})
structlog.get_logger("x").info("started", port=1)
structlog.get_logger("x").debug("unseen")
logging.getLogger("library").warning("from a library")
try:
    1 / 0
except ZeroDivisionError:
    structlog.get_logger("x").exception("broke")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert "unseen" not in done.stderr
    if form == "text":
        assert "from a library" in done.stderr
        return
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["event"] for line in lines] == ["started", "from a library", "broke"]
    assert lines[0]["port"] == 1
    assert lines[0]["level"] == "info"
    assert "timestamp" in lines[0]
    assert lines[2]["exception"][0]["exc_type"] == "ZeroDivisionError"
