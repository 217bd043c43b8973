"""What a start does not take over: nothing at all, with a reason, or what was damaged."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from agents_in_turn import PAGE, Node, put, right, settle
from kvtier_agent.cache import page_table, table_notes
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.record import RECORD
from kvtier_agent.cache.settings import Behaviour, Budgets
from kvtier_agent.cache.snapshot import check_books
from kvtier_agent.cache.table_view import HEADER, HEADER_BYTES
from kvtier_agent.storage.core import CoreError


def header(node: Node, **fields) -> None:
    with node.table.open("r+b") as file:
        raw = np.frombuffer(file.read(HEADER.itemsize), dtype=HEADER).copy()
        for name, value in fields.items():
            raw[name] = value
        file.seek(0)
        file.write(raw.tobytes())


def scribble(path: Path, start: int, count: int) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(np.random.default_rng(3).bytes(count))


def replace(path: Path) -> None:
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    copy.chmod(path.stat().st_mode & 0o777)
    copy.replace(path)


def link(path: Path) -> None:
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)


COLD: dict[str, tuple[Callable[[Node], object], str]] = {
    "newer layout": (lambda n: header(n, layout_version=99), "has layout 99, this agent has"),
    "older layout": (lambda n: header(n, layout_version=1), "has layout 1, this agent has"),
    "record size": (lambda n: header(n, record_bytes=256), "has layout"),
    "no table": (lambda n: scribble(n.table, 0, 64), "is no page table"),
    "capacity": (lambda n: header(n, capacity=1 << 40), "contradicts itself"),
    "pages": (lambda n: header(n, pages=1 << 40), "contradicts itself"),
    "max pages": (lambda n: header(n, max_pages=1 << 40), "is cut short"),
    "geometry": (
        lambda n: scribble(n.table, table_notes.GEOMETRY.offset, 40), "what its pages are"
    ),
    "all records": (
        lambda n: scribble(n.table, HEADER_BYTES, 60 * RECORD.itemsize),
        "no record of the page table can be believed",
    ),
    "table truncated": (lambda n: os.truncate(n.table, 20_000), "is cut short"),
    "table empty": (lambda n: os.truncate(n.table, 0), "is cut short"),
    "table's mode": (lambda n: n.table.chmod(0o666), "its mode is 666, not 640"),
    "table a link": (lambda n: link(n.table), "cannot open the page table"),
    "arena truncated": (lambda n: os.truncate(n.l1, 50 * PAGE), "it has 204800 bytes"),
    "arena's size": (lambda n: os.truncate(n.l1, (1 << 22) + 1), "it has 4194305 bytes"),
    "arena gone": (lambda n: n.l1.unlink(), "cannot open the arena"),
    "arena another": (lambda n: replace(n.l1), "another file than the page table was made for"),
    "arena's mode": (lambda n: n.l1.chmod(0o666), "its mode is 666, not 660"),
    "arena a link": (lambda n: link(n.l1), "cannot open the arena"),
    "arena's names": (
        lambda n: (n.folder / "name").hardlink_to(n.l1), "no regular file of one name"
    ),
    "folder": (lambda n: n.folder.chmod(0o777), "others may write to"),
}  # fmt: skip


@pytest.mark.parametrize("what", COLD)
def test_what_is_not_as_we_would_have_made_it_is_a_cold_start_with_its_reason(
    node: Node, way: str, what: str
) -> None:
    put(node.start(), range(60))
    node.end(way)
    spoil, reason = COLD[what]
    spoil(node)
    core = node.start()
    assert reason in core.memory.restart.cold
    assert core.memory.restart.say().startswith("the dram tier started cold: ")
    assert core.memory.restart.taken_over == 0
    assert core.cache.snapshot(1.0).pages == 0
    put(core, range(30))
    assert right(core, range(60)) == list(range(30)), "and goes on as any other"
    check_books(core.cache)
    assert node.table.stat().st_mode & 0o777 == 0o640
    assert node.l1.stat().st_mode & 0o777 == 0o660
    if what == "folder":
        return
    node.end(way)
    assert right(node.start(), range(60)) == list(range(30))


def test_another_group_is_a_cold_start(node: Node) -> None:
    if os.geteuid():
        pytest.skip("only root may give files to a group it is not in")
    put(node.start(gid=23000), range(10))
    node.kill()
    assert "belongs to group 23000, not 23001" in node.start(gid=23001).memory.restart.cold


def test_garbage_in_the_index_is_no_matter(node: Node, way: str) -> None:
    put(node.start(), range(60))
    node.end(way)
    scribble(node.table, HEADER_BYTES + 4096 * RECORD.itemsize, 16384)
    assert right(node.start(), range(60)) == list(range(60))


def test_garbage_in_some_records_costs_those(node: Node, way: str) -> None:
    put(node.start(), range(60))
    node.end(way)
    table = np.memmap(node.table, dtype=np.uint8, mode="r+")
    records = table[HEADER_BYTES : HEADER_BYTES + 4096 * RECORD.itemsize].view(RECORD)
    rows = np.flatnonzero(records["state"])[:15]
    raw = records.view(np.uint8).reshape(-1, RECORD.itemsize)
    raw[rows] = np.random.default_rng(5).integers(0, 256, (15, RECORD.itemsize), dtype=np.uint8)
    del table, records, raw
    core = node.start()
    assert core.memory.restart.taken_over == 45
    assert sum(core.memory.restart.dropped.values()) == 15
    assert len(right(core, range(60))) == 45
    check_books(core.cache)


def test_another_model_starts_cold_and_its_pages_take_the_place(node: Node, way: str) -> None:
    put(node.start(), range(60))
    node.end(way)
    core = node.start()
    other = Geometry.of_page_bytes(3 * PAGE, 16)
    assert not core.register(1.0, other).accepted
    settle(core)
    assert core.reshape(1.0, other).accepted
    assert core.cache.snapshot(1.0).pages == 0
    node.end("kill")
    assert node.start().memory.restart == type(core.memory.restart)(), "nothing was there"


def test_a_larger_agent_grows_the_arena_and_a_smaller_one_leaves_it(node: Node, way: str) -> None:
    put(node.start(maximum=128), range(60))
    node.end(way)
    core = node.start(maximum=512, l1=400)
    assert core._l1.size_bytes == 512 * PAGE
    put(core, range(100, 300))
    node.end(way)
    core = node.start(maximum=128, l1=128)
    assert core._l1.size_bytes == 512 * PAGE
    settle(core)
    assert len(right(core, range(300))) == 128
    assert core._l1.backed_bytes == 128 * PAGE
    check_books(core.cache)


def test_a_table_for_fewer_pages_takes_the_warmest(node: Node, way: str) -> None:
    put(node.start(l1=210, max_pages=4096), range(200))
    node.end(way)
    core = node.start(l1=200, max_pages=64)
    assert core.memory.restart.dropped == {"room": 136}
    assert right(core, range(200)) == list(range(136, 200))


def test_two_agents_do_not_share_the_files(node: Node) -> None:
    first = node.start()
    put(first, range(10))
    with pytest.raises(CoreError, match="in use by another agent; stop it"):
        node.agent()
    assert right(first, range(10)) == list(range(10))
    node.core = first


def test_files_are_removed_where_they_are_of_no_use(node: Node) -> None:
    node.start()
    assert node.stop() is False
    assert not list(node.folder.glob("d.*"))
    put(node.start(keep_memory=False), range(10))
    assert node.stop() is False
    assert not list(node.folder.glob("d.*"))


def test_a_start_that_is_killed_leaves_everything_to_the_next(
    node: Node, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(node.start(), range(60))
    node.end(way)

    class KilledError(Exception):
        pass

    def die(_: object) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(page_table.PageTable, "publish", die)
        with pytest.raises(KilledError):
            node.agent()
    assert right(node.start(), range(60)) == list(range(60))


def test_memory_that_went_back_is_not_counted_on(node: Node, way: str) -> None:
    """A tier that shrank and grew: which slots have memory is known after a restart as well."""
    core = node.start(l1=100)
    put(core, range(100))
    for l1 in (30, 60):
        core.reconfigure(1.0, Behaviour(), Budgets(0, l1 * PAGE, 0))
        settle(core)
    node.end(way)
    core = node.start(l1=80)
    assert core._l1.backed_bytes == 80 * PAGE
    put(core, range(200, 278))
    assert right(core, range(200, 278)) == list(range(200, 278))
    check_books(core.cache)
