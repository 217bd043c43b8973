"""The wall clock jumps; nothing but the times that people read moves with it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvtier_agent.node import backoff, budgets, cadence, control, lifecycle, memory, report, watch
from kvtier_agent.node.board import SAVE_SECONDS, StatusBoard
from kvtier_agent.node.control import Control
from kvtier_agent.node.desired import Absent
from kvtier_agent.node.lifecycle import Phase
from kvtier_agent.node.memory import Memory
from kvtier_agent.server.loop import CacheLoop
from kvtier_agent.server.settings import ServerSettings
from kvtier_agent.supervise import Supervisor

Make = Callable[..., Any]


@pytest.mark.parametrize("jump", [-10 * 365 * 86400.0, 10 * 365 * 86400.0], ids=["back", "forth"])
def test_a_jump_of_the_wall_clock_ends_no_grace_and_keeps_no_save_from_being_made(
    tmp_path: Path, tiers: Any, facts: Make, wanted: Make, jump: float
) -> None:
    clock, wall = [1000.0], [1.8e9]
    control_ = Control(tiers, facts, clock=lambda: clock[0])
    loop = CacheLoop(ServerSettings(tmp_path / "run"))
    shown = tmp_path / "status.json"
    board = StatusBoard(
        control_, loop, Supervisor(), Memory(tmp_path, "n"), shown,
        clock=lambda: clock[0], wall=lambda: wall[0],
    )  # fmt: skip

    def step(seconds: float) -> dict[str, Any]:
        clock[0] += seconds
        wall[0] += seconds
        control_.turn(clock[0])
        board.save()
        made: dict[str, Any] = json.loads(shown.read_text())
        return made

    try:
        control_.say(wanted(), None)
        step(1.0)
        control_.say(Absent(60.0), None)
        step(1.0)
        wall[0] += jump
        status = step(30.0)
        assert control_.view.life.phase is Phase.ORPHANED
        assert tiers.drops == 0
        ready = next(c for c in status["conditions"] if c["type"] == "Ready")
        assert "another 30 s" in ready["message"]
        step(SAVE_SECONDS + 1)
        left = json.loads((tmp_path / "state.json").read_text())["graceLeftSeconds"]
        assert left == pytest.approx(60 - 30 - SAVE_SECONDS - 1)
        step(30.0)
        assert control_.view.life.phase is Phase.DROPPED
        assert tiers.drops > 0
    finally:
        loop.close()


def test_logic_reads_no_wall_clock() -> None:
    for module in (backoff, budgets, cadence, control, lifecycle, memory, report, watch):
        source = inspect.getsource(module)
        assert "time.time" not in source, module.__name__
        assert "datetime" not in source, module.__name__
