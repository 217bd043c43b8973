"""What the engines' own KV pool counts as, while they come and go and the agent restarts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kvtier_agent.node.engine_pool import RETURN_SECONDS, EnginePool
from kvtier_agent.node.memory import Memory

GI = 1 << 30


def test_an_engine_that_goes_leaves_its_part_in() -> None:
    pool = EnginePool(0, 100.0)
    assert pool.bytes_at(0, 101.0) == 0, "none is known"
    assert pool.bytes_at(50 * GI, 102.0) == 50 * GI
    assert pool.bytes_at(400 * GI, 103.0) == 400 * GI
    assert pool.bytes_at(0, 1e9) == 400 * GI


def test_after_a_restart_what_was_known_counts_until_engines_had_their_time() -> None:
    pool = EnginePool(400 * GI, 100.0)
    assert pool.bytes_at(0, 100.0) == 400 * GI
    assert pool.bytes_at(50 * GI, 101.0) == 400 * GI, "one rank of eight is back"
    assert pool.bytes_at(0, 99.0 + RETURN_SECONDS) == 400 * GI
    assert pool.bytes_at(0, 101.0 + RETURN_SECONDS) == 50 * GI, "there is but this one now"
    assert EnginePool(400 * GI, 100.0).bytes_at(0, 1e9) == 400 * GI, "none has come yet"
    assert EnginePool(50 * GI, 100.0).bytes_at(400 * GI, 101.0) == 400 * GI


@pytest.mark.parametrize("kept", [-1, True, 1.5, "8", None])
def test_rubbish_is_no_pool(tmp_path: Path, kept: object) -> None:
    memory = Memory(tmp_path, "n")
    memory.engine_pool = 7
    memory.save({}, None)
    again = Memory(tmp_path, "n")
    again.recall()
    assert again.engine_pool == 7
    other = Memory(tmp_path, "another node")
    other.recall()
    assert other.engine_pool == 0
    path = tmp_path / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "enginePoolBytes": kept}))
    again.recall()
    assert again.engine_pool == 0
