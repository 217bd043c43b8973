"""L1 over a restart of the agent: what is taken over, and how it goes on from there."""

from __future__ import annotations

import os

import pytest
from agents_in_turn import GEOMETRY, KEYS, PAGE, Node, put, right, settle
from kvtier_agent.cache.snapshot import check_books


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


def test_pages_of_dram_that_go_down_at_once_take_no_slot_of_pages_found_on_nvme(
    node: Node, way: str
) -> None:
    core = node.start(l1=40, l2=160)
    put(core, range(100))
    there = right(core, range(100))
    assert len(there) == 100
    node.end(way)
    core = node.agent()
    core.reconfigure(1.0, *node.revision(l1=20, l2=160))  # more in DRAM than it may hold now
    assert core.register(1.0, GEOMETRY).accepted
    assert core.cache.counters.found_pages > 40
    assert core.cache.counters.dropped_found_pages == 0
    settle(core)
    check_books(core.cache)
    assert right(core, range(100)) == there


def test_deleted_pages_do_not_come_back_after_an_orderly_stop(node: Node) -> None:
    """Neither those whose room was still to be given back."""
    core = node.start(l1=40, l2=160)
    put(core, range(100))
    there = right(core, range(100))
    assert len(there) == 100
    core.cache.delete(1.0, KEYS[:90])
    node.stop()
    core = node.agent()
    core.reconfigure(1.0, *node.revision(l1=40, l2=160))
    assert core.register(1.0, GEOMETRY).accepted
    assert right(core, range(100)) == list(range(90, 100))
    check_books(core.cache)
