"""A client that cuts an arena short is noticed, once and for good."""

import os

import pytest
import structlog
from kvtier_agent.cache.arena import ShmArena
from kvtier_agent.storage.arena_watch import ArenaLoss, ArenaWatch

MI = 1 << 20


@pytest.fixture
def arenas(mount):
    made = [ShmArena(mount / f"d.l{layer}", MI) for layer in (0, 1)]
    yield made
    for arena in made:
        arena.close()


def test_a_cut_is_seen_said_once_and_not_forgotten(arenas):
    watch, pairs = ArenaWatch("d"), list(enumerate(arenas))
    with structlog.testing.capture_logs() as said:
        assert watch.look(pairs) == (ArenaLoss(0), ArenaLoss(1))
        assert not any(watch.look(pairs))
        assert said == []
        os.truncate(arenas[1].path, MI - 8192)
        assert watch.look(pairs) == (ArenaLoss(0), ArenaLoss(1, 0, 8192))
        os.truncate(arenas[1].path, MI)
        assert watch.look(pairs)[1].cut_bytes == 8192, "what lay there is gone all the same"
        os.truncate(arenas[1].path, 4096)
        assert watch.look(pairs)[1].cut_bytes == MI - 4096
    assert [(line["file"], line["bytes_missing"]) for line in said] == [(str(arenas[1].path), 8192)]
    assert said[0]["log_level"] == "error"


def test_pages_that_were_found_gone_count_though_the_file_is_whole_again(arenas, monkeypatch):
    monkeypatch.setattr(ShmArena, "lost_pages", property(lambda arena: 3 * (arena is arenas[0])))
    assert ArenaWatch("d").look(enumerate(arenas)) == (ArenaLoss(0, 3), ArenaLoss(1))


def test_memory_of_a_device_and_a_closed_arena_are_nobodys_to_cut(arenas):
    arenas[1].close()
    assert ArenaWatch("d").look([(0, None), (0, object()), (1, arenas[1])]) == (ArenaLoss(1),)
