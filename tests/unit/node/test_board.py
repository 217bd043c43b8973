"""The status board: what it shows is what it keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvtier_agent.node import board as board_module
from kvtier_agent.node.board import SAVE_SECONDS, StatusBoard
from kvtier_agent.node.control import Control
from kvtier_agent.node.memory import Memory
from kvtier_agent.server.loop import CacheLoop
from kvtier_agent.server.settings import ServerSettings
from kvtier_agent.supervise import Supervisor

Make = Callable[..., Any]


def test_the_api_server_is_told_no_counter_that_a_kill_could_take_back(
    tmp_path: Path, tiers: Any, facts: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, counted = [1000.0], {"pages_stored": 0}
    monkeypatch.setattr(board_module, "counters_of", lambda _snapshot: dict(counted))
    loop = CacheLoop(ServerSettings(tmp_path / "run"))
    board = StatusBoard(
        Control(tiers, facts, clock=lambda: clock[0]), loop, Supervisor(), Memory(tmp_path, "n"),
        tmp_path / "status.json", clock=lambda: clock[0],
    )  # fmt: skip

    def after_a_kill() -> int:
        memory = Memory(tmp_path, "n")
        memory.recall()
        return memory.closed.get("pages_stored", 0)

    try:
        board.save()
        counted["pages_stored"] = 7
        clock[0] += 1
        board.save()  # nothing urgent: not yet due
        assert board.status({})["counters"]["pagesStored"] <= after_a_kill() == 0
        clock[0] += SAVE_SECONDS
        board.save()
        assert board.status({})["counters"]["pagesStored"] == after_a_kill() == 7
    finally:
        loop.close()
