"""L1 over a restart of the agent: what is taken over, and what makes the start a cold one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash
from kvtier_agent.cache import page_table, table_notes
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.record import RECORD
from kvtier_agent.cache.results import MISS
from kvtier_agent.cache.settings import Behaviour, Budgets, CacheSettings, FrozenPrefix
from kvtier_agent.cache.snapshot import check_books
from kvtier_agent.cache.table_view import HEADER, HEADER_BYTES
from kvtier_agent.storage.core import Core, CoreError, CoreSettings

PAGE = 4096
GEOMETRY = Geometry.of_page_bytes(PAGE, 16)
KEYS = np.random.default_rng(7).integers(0, 256, (400, 16), dtype=np.uint8)


def page(i: int) -> np.ndarray:
    return np.random.default_rng(1000 + i).integers(0, 256, PAGE, dtype=np.uint8)


class Node:
    """A place where agents follow upon each other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.table = folder / "d.table"
        self.l1 = folder / "d.l1"
        self.core: Core | None = None

    def start(self, l1: int = 100, l2: int = 0, maximum: int = 256, **options) -> Core:
        """The next agent under a revision. L0 is the engine's."""
        (self.folder / "data0").mkdir(exist_ok=True)
        self.core = self.agent(maximum, **options)
        volumes = ("data0",) if l2 else ()
        self.core.reconfigure(
            1.0, Behaviour(frozen=(FrozenPrefix("bot", 8 * PAGE),)),
            Budgets(0, l1 * PAGE, l2 * 2 * PAGE, volumes, 0),
        )  # fmt: skip
        return self.core

    def agent(self, maximum: int = 256, max_pages: int = 4096, **options) -> Core:
        self.core = Core(
            CoreSettings(
                "d", self.folder, self.table, {"data0": self.folder / "data0"},
                maximum * PAGE, maximum * PAGE, allow_root_filesystem=True, synchronous=True,
                cache=CacheSettings(max_pages=max_pages), **options,
            )
        )  # fmt: skip
        return self.core

    def kill(self) -> None:
        """As SIGKILL does it: descriptors are closed, nothing else happens."""
        core, self.core = self.core, None
        os.close(core.memory._lock)
        core.memory._lock = -1
        core.nvme.close()

    def stop(self) -> bool:
        core, self.core = self.core, None
        return core.close()

    def end(self, way: str) -> None:
        assert getattr(self, way)() in (None, True)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    if made.core is not None:
        made.core.close()


def put(core: Core, which, **options) -> None:
    assert core.register(1.0, GEOMETRY).accepted
    for i in which:
        key = KEYS[i : i + 1]
        result = core.cache.reserve(1.0, 1, key, **options)
        assert result.tier[0] == 1, result.status
        start = int(result.offset[0])
        core._l1.bytes[start : start + PAGE] = page(i)
        sums = np.array([xxhash.xxh3_64_intdigest(page(i))], dtype=np.uint64)
        assert (core.cache.commit(1.0, 1, key, sums) == 0).all()
        settle(core)


def settle(core: Core) -> None:
    for _ in range(100):
        core.pump()
        core.collect(1.0)
        if not core.cache.traffic.in_flight and not core.cache.traffic.moves:
            return


def right(core: Core, which) -> list[int]:
    """Pages that load with their own bytes; every other answer has to be a miss."""
    out = []
    for i in which:
        ticket = core.cache.load(2.0, 2, KEYS[i : i + 1], 1e9)
        core.pump()
        done = [ticket, *core.collect(2.0)][-1]
        if done.tier[0] != MISS:
            start = int(done.offset[0])
            copy = core._l1.bytes[start : start + PAGE].copy()
            if xxhash.xxh3_64_intdigest(copy) == int(done.checksum[0]):
                assert np.array_equal(copy, page(i)), "a wrong byte would have been served"
                out.append(i)
            else:
                core.cache.report_bad(2.0, 2, done.lease, np.array([0]))
        core.cache.release(2.0, 2, done.lease)
    return out


@pytest.fixture(params=["kill", "stop"])
def way(request: pytest.FixtureRequest) -> str:
    return request.param


def test_pages_of_l1_are_there_again(node: Node, way: str) -> None:
    put(node.start(), range(60))
    first = node.core.boot_id
    node.end(way)
    core = node.start()
    assert core.memory.restart.taken_over == 60
    assert core.memory.restart.say() == "60 pages of the dram tier were taken over, none dropped"
    assert core.boot_id != first
    check_books(core.cache)
    assert core.register(1.0, GEOMETRY).accepted
    assert right(core, range(60)) == list(range(60))
    check_books(core.cache)
    put(core, range(100, 140))
    assert right(core, range(100, 140)) == list(range(100, 140))
    check_books(core.cache)


def test_again_and_again(node: Node, way: str) -> None:
    put(node.start(), range(20))
    for _ in range(5):
        node.end(way)
        core = node.start()
        assert right(core, range(20)) == list(range(20))
    check_books(core.cache)


def test_an_agent_that_no_revision_came_to_leaves_them_to_the_next(node: Node, way: str) -> None:
    put(node.start(), range(20))
    node.end(way)
    core = node.agent()
    assert right(core, range(20)) == list(range(20)), "they are served meanwhile"
    core.cache.tick(5.0)
    node.end(way)
    assert right(node.start(), range(20)) == list(range(20))


def test_without_a_policy_the_memory_goes_back(node: Node) -> None:
    put(node.start(), range(20))
    node.kill()
    core = node.agent()
    core.drop(1.0)
    settle(core)
    assert core.cache.snapshot(1.0).pages == 0
    assert core._l1.backed_bytes == 0
    core.drop(2.0)
    assert node.stop() is False
    assert not list(node.folder.glob("d.*"))


def test_the_order_of_use_is_kept(node: Node, way: str) -> None:
    core = node.start(l1=20)
    put(core, range(20))
    assert right(core, range(10)) == list(range(10))
    node.end(way)
    core = node.start(l1=10)
    settle(core)
    assert right(core, range(20)) == list(range(10)), "those used last"
    assert core._l1.backed_bytes == 10 * PAGE


def test_links_of_chains_are_made_anew(node: Node, way: str) -> None:
    core = node.start(l1=10)
    assert core.register(1.0, GEOMETRY).accepted
    for i in range(10):
        put(core, [i], parent=KEYS[i - 1].tobytes() if i else bytes(16), depth=16 * i)
    node.end(way)
    core = node.start(l1=10)
    assert right(core, [9]) == [9]  # a touch of the last page touches the chain
    put(core, range(20, 25))
    assert right(core, [0, 1, 2]) == [0, 1, 2], "leaves go before their parents"


def test_frozen_prefixes_keep_their_pages(node: Node, way: str) -> None:
    core = node.start(l1=20)
    put(core, range(5), frozen="bot")
    put(core, range(10, 25))
    node.end(way)
    core = node.start(l1=20)
    assert core.cache.snapshot(1.0).frozen[0].exempt_pages == 5
    put(core, range(30, 50))
    assert right(core, range(5)) == list(range(5))
    check_books(core.cache)


@pytest.mark.parametrize("hold", ["lease", "reservation"])
def test_what_clients_held_is_void(node: Node, way: str, hold: str) -> None:
    core = node.start()
    put(core, range(10))
    if hold == "lease":
        core.cache.load(1.0, 1, KEYS[:10], 1e9)
    else:
        core.cache.reserve(1.0, 1, KEYS[10:20])
    node.end(way)
    core = node.start()
    snapshot = core.cache.snapshot(1.0)
    assert (snapshot.pinned_pages, snapshot.reservations, snapshot.pages) == (0, 0, 10)
    assert core.memory.restart.dropped == ({} if hold == "lease" else {"unfinished": 10})
    check_books(core.cache)


def test_a_page_on_both_tiers_keeps_its_clean_copy_if_recovery_finds_it(
    node: Node, way: str
) -> None:
    core = node.start(l1=40, l2=200)
    put(core, range(100))
    assert len(right(core, range(100))) == 100  # the last ones read up, with their copies
    node.end(way)
    core = node.start(l1=40, l2=200)
    check_books(core.cache)
    assert core.memory.restart.taken_over > 20
    both = core.table.live_rows()
    assert (core.table.tiers[both] == 6).any()
    assert right(core, range(100)) == list(range(100))
    check_books(core.cache)
    put(core, range(100, 140))
    check_books(core.cache)
    assert right(core, range(140)) == list(range(140))


def test_copies_that_recovery_does_not_find_are_forgotten(node: Node, way: str) -> None:
    core = node.start(l1=40, l2=200)
    put(core, range(100))
    right(core, range(100))
    node.end(way)
    for path in (node.folder / "data0").rglob("*"):
        if path.is_file():
            path.unlink()
    core = node.start(l1=40, l2=200)
    check_books(core.cache)
    held = core.memory.restart.taken_over
    assert len(right(core, range(100))) == held
    put(core, range(200, 260))
    check_books(core.cache)


def test_a_flipped_byte_is_a_miss(node: Node, way: str) -> None:
    put(node.start(), range(20))
    node.end(way)
    with node.l1.open("r+b") as file:
        file.seek(7 * PAGE + 100)
        byte = file.read(1)[0]
        file.seek(7 * PAGE + 100)
        file.write(bytes([byte ^ 1]))
    core = node.start()
    assert len(right(core, range(20))) == 19
    assert core.cache.counters.quarantined_pages == 1
    check_books(core.cache)


def test_bytes_that_are_wrong_never_go_to_nvme(node: Node) -> None:
    put(node.start(), range(20))
    node.kill()
    size = node.l1.stat().st_size
    node.l1.write_bytes(bytes(size))
    os.truncate(node.l1, size)
    core = node.start(l1=10, l2=100)
    settle(core)
    assert core.cache.counters.stored_l2 == 0
    assert right(core, range(20)) == []
    check_books(core.cache)


# -- cold starts ----------------------------------------------------------------------------------


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
