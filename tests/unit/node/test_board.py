"""The status board: what it shows is what it keeps."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvtier_agent.node import board as board_module
from kvtier_agent.node.board import SAVE_SECONDS, StatusBoard
from kvtier_agent.node.control import Control
from kvtier_agent.node.memory import Memory
from kvtier_agent.node.statefile import StateFile
from kvtier_agent.server.loop import CacheLoop
from kvtier_agent.server.settings import ServerSettings
from kvtier_agent.storage.arena_watch import ArenaLoss
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


def test_counters_that_cannot_be_kept_are_not_shown_and_the_condition_says_why(
    tmp_path: Path, tiers: Any, facts: Make, wanted: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, counted = [1000.0], {"pages_stored": 0}
    monkeypatch.setattr(board_module, "counters_of", lambda _snapshot: dict(counted))
    real, full = StateFile.write, [False]

    def write(self: StateFile, document: Any) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, document)

    monkeypatch.setattr(StateFile, "write", write)
    loop = CacheLoop(ServerSettings(tmp_path / "run"))
    control = Control(tiers, facts, clock=lambda: clock[0])
    memory = Memory(tmp_path, "n")
    board = StatusBoard(
        control, loop, Supervisor(), memory, tmp_path / "status.json", clock=lambda: clock[0]
    )

    def shown() -> tuple[int, int]:
        document = json.loads((tmp_path / "status.json").read_text())
        told = board.status({})["counters"]["pagesStored"]
        return document["counters"]["pagesStored"], told

    def said() -> str:
        conditions = board.status({})["conditions"]
        return str(next(c["message"] for c in conditions if c["type"] == "Ready"))

    def save(pages: int) -> None:
        counted["pages_stored"] = pages
        clock[0] += SAVE_SECONDS
        board.save()

    one = wanted()
    try:
        control.say(one, None, 3)
        control.turn(clock[0])
        save(7)
        assert shown() == (7, 7)
        full[0] = True
        memory.keep(one)
        save(9)
        assert shown() == (7, 7), "a kill now would take the two away"
        ready = said()
        assert "state.json cannot be written (No space left on device)" in ready
        assert "counters shown here stand still" in ready
        full[0] = False
        save(10)
        assert shown() == (10, 10)
        assert "cannot be written" not in said()
        recalled = Memory(tmp_path, "n").recall()[0]
        assert recalled is not None
        assert recalled.revision == one.revision, "it was written later"
        two = wanted(durability="none")
        memory.keep(two)
        board.save()
        recalled = Memory(tmp_path, "n").recall()[0]
        assert recalled is not None
        assert recalled.revision == two.revision, "a revision is not left for the next few seconds"
    finally:
        loop.close()


def test_a_state_disk_that_hangs_is_said_and_holds_nothing_up(
    tmp_path: Path, tiers: Any, facts: Make, wanted: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board_module, "PATIENCE_SECONDS", 4.0)
    real, thaw = os.fsync, threading.Event()

    def fsync(descriptor: int) -> None:
        assert thaw.wait(60.0)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    supervisor = Supervisor(stuck_seconds=2.0)
    memory, loop = Memory(tmp_path, "n"), CacheLoop(ServerSettings(tmp_path / "run"))
    control = Control(tiers, facts, keep=memory.keep)
    board = StatusBoard(
        control, loop, supervisor, memory, tmp_path / "status.json", save_seconds=0.1
    )

    def until(condition: Callable[[], object]) -> None:
        end = time.monotonic() + 20.0
        while not condition():
            assert supervisor.causes() == [], "a slow disk is no reason to end the agent"
            assert time.monotonic() < end
            time.sleep(0.02)

    try:
        supervisor.start("state", board.run)
        before = time.monotonic()
        for seconds in (7, 8):
            control.say(wanted(replacement={"coolDownSeconds": seconds}), None, 3)
            control.turn(before)
        assert time.monotonic() - before < 3.0, "the control waits for no disk"
        until(lambda: "cannot be written (the disk does not answer)" in memory.problem)
        started = time.monotonic()
        assert not memory.save({}, None, 5.0)
        assert time.monotonic() - started < 4.0, "nobody waits again for what hangs"
        until(lambda: time.monotonic() - started > 4.5)
        thaw.set()
        until(lambda: not memory.problem and (tmp_path / "revision.json").exists())
        recalled = Memory(tmp_path, "n").recall()[0]
        assert recalled is not None
        assert recalled.revision == control.view.in_force
    finally:
        thaw.set()
        supervisor.stop()
        loop.close()


def test_an_arena_that_was_cut_short_reaches_the_condition(
    tmp_path: Path, tiers: Any, facts: Make, wanted: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board_module, "counters_of", lambda _snapshot: {})
    monkeypatch.setattr(board_module, "tiers_of", lambda _snapshot: ())
    domain = SimpleNamespace(name="chat", restart="", lost_memory=(ArenaLoss(0), ArenaLoss(1)))
    loop: Any = SimpleNamespace(snapshot=SimpleNamespace(domains={"chat": domain}))
    control = Control(tiers, facts)
    control.say(wanted(), None)
    control.turn(0.0)
    board = StatusBoard(
        control, loop, Supervisor(), Memory(tmp_path, "n"), tmp_path / "status.json"
    )

    def ready() -> dict[str, str]:
        (found,) = [c for c in board.status({})["conditions"] if c["type"] == "Ready"]
        return found

    assert ready()["reason"] == "InForce"
    domain.lost_memory = (ArenaLoss(0), ArenaLoss(1, lost_pages=2))
    assert (ready()["status"], ready()["reason"]) == ("False", "MemoryCut")
    assert "dram of domain chat" in ready()["message"]
