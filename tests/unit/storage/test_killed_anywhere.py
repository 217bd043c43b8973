"""A process that is killed between any two changes of the page table leaves one that the next can
take over: no wrong byte, no slot with two owners, books that balance."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.page_table import PageTable
from kvtier_agent.cache.record import Rows, State
from kvtier_agent.cache.results import MISS
from kvtier_agent.cache.settings import Behaviour, Budgets, CacheSettings
from kvtier_agent.cache.snapshot import check_books
from kvtier_agent.storage.core import Core, CoreSettings

PAGE = 4096
GEOMETRY = Geometry.of_page_bytes(PAGE, 16)
PAGES = 120
KEYS = np.random.default_rng(7).integers(0, 256, (PAGES, 16), dtype=np.uint8)
BYTES = np.random.default_rng(8).integers(0, 256, (PAGES, PAGE), dtype=np.uint8)
SUMS = np.array([xxhash.xxh3_64_intdigest(page) for page in BYTES], dtype=np.uint64)


class KilledError(BaseException):
    """Not an Exception: nobody who cleans up after errors may catch it."""


class Fuse:
    """Ends the process at the n-th change of records: before it, or in the middle of it."""

    def __init__(self, patch: pytest.MonkeyPatch, after: int, middle: bool) -> None:
        self.left = after
        state_, changing_, unlink_ = PageTable.set_state, PageTable.changing, PageTable.unlink

        def set_state(table: PageTable, rows: Rows, new: State) -> None:
            if self.burnt():
                if middle:
                    table.seq[rows] += np.uint32(1)
                    table.state[rows[: len(rows) // 2]] = new
                raise KilledError
            state_(table, rows, new)

        @contextlib.contextmanager
        def changing(table: PageTable, rows: Rows) -> Iterator[None]:
            dies = self.burnt()
            if dies and not middle:
                raise KilledError
            with changing_(table, rows):
                yield
                if dies:
                    table.seq[rows] -= np.uint32(1)  # what leaving the context adds
                    raise KilledError

        def unlink(table: PageTable, rows: Rows) -> None:
            if self.burnt():
                raise KilledError
            unlink_(table, rows)

        patch.setattr(PageTable, "set_state", set_state)
        patch.setattr(PageTable, "changing", changing)
        patch.setattr(PageTable, "unlink", unlink)

    def burnt(self) -> bool:
        self.left -= 1
        return self.left == 0


def agent(folder: Path) -> Core:
    (folder / "data0").mkdir(exist_ok=True)
    core = Core(
        CoreSettings(
            "d", folder, folder / "d.table", {"data0": folder / "data0"}, 16 * PAGE, 40 * PAGE,
            allow_root_filesystem=True, synchronous=True, cache=CacheSettings(max_pages=1024),
        )
    )  # fmt: skip
    core.reconfigure(
        1.0, Behaviour(cool_down_seconds=0.0),
        Budgets(8 * PAGE, 24 * PAGE, 120 * PAGE, ("data0",), 0),
    )  # fmt: skip
    assert core.register(1.0, GEOMETRY).accepted
    return core


def settle(core: Core) -> None:
    for _ in range(50):
        core.pump()
        core.collect(2.0)
        if not core.cache.traffic.in_flight and not core.cache.traffic.moves:
            return


def work(core: Core, seed: int) -> None:
    """Puts, loads, aborts and bad pages at random, with all that they set in motion."""
    dice = np.random.default_rng(seed)
    arenas = (core._l0, core._l1)
    for _ in range(60):
        some = dice.choice(PAGES, 4, replace=False)
        what = dice.random()
        if what < 0.6:
            result = core.cache.reserve(2.0, 1, KEYS[some])
            offered = np.flatnonzero(result.status == 0)
            for i in offered.tolist():
                start = int(result.offset[i])
                arenas[result.tier[i]].bytes[start : start + PAGE] = BYTES[some[i]]
            mine = some[offered]
            if what < 0.1:
                core.cache.abort(2.0, 1, KEYS[mine])
            else:
                core.cache.commit(2.0, 1, KEYS[mine], SUMS[mine])
        else:
            ticket = core.cache.load(2.0, 2, KEYS[some], 1e9)
            settle(core)
            if what > 0.9:
                core.cache.report_bad(2.0, 2, ticket.lease, np.array([0]))
            core.cache.release(2.0, 2, ticket.lease)
        settle(core)


@pytest.mark.parametrize("middle", [False, True], ids=["before", "middle"])
@pytest.mark.parametrize("after", [*range(1, 40, 3), *range(40, 700, 37)])
def test_killed_at_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, middle: bool
) -> None:
    core = agent(tmp_path)
    with monkeypatch.context() as patch:
        Fuse(patch, after, middle)
        with contextlib.suppress(KilledError):
            work(core, after)
    # As the kernel does it.
    os.close(core.memory._lock)
    core.memory._lock = -1
    core.nvme.close()

    core = agent(tmp_path)
    assert not core.memory.restart.cold
    assert not core.memory.restart.damaged, "a kill damages nothing"
    settle(core)
    check_books(core.cache)
    arenas = (core._l0, core._l1)
    for i in range(PAGES):
        ticket = core.cache.load(3.0, 3, KEYS[i : i + 1], 1e9)
        core.pump()
        done = [ticket, *core.collect(3.0)][-1]
        if done.tier[0] != MISS:
            start = int(done.offset[0])
            copy = arenas[done.arena[0]].bytes[start : start + PAGE]
            assert np.array_equal(copy, BYTES[i]), "whole and its own"
        core.cache.release(3.0, 3, done.lease)
        settle(core)
    work(core, after + 1)
    check_books(core.cache)
    core.close()
