"""Shared memory that is enlarged while an agent runs."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvtier_agent.node import facts
from kvtier_agent.node.main import Agent
from kvtier_agent.settings import AgentSettings
from kvtier_api.reasons import Reason
from kvtier_cli.options import read_settings

MI = 1 << 20
POLICY = """
apiVersion: kvtier.io/v1alpha1
kind: KVTierPolicy
metadata: {name: alone}
spec:
  tiers: {hbm: {size: 4Mi}, dram: {size: 64Mi}}
  valueDensity: {model: classic}
  replacement: {coolDownSeconds: SECONDS}
"""


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    """Started in a shared memory of 32 MiB that has its real size ever after."""
    monkeypatch.delenv("NODE_NAME", raising=False)
    monkeypatch.setattr(facts, "size_of", lambda _: 32 * MI)
    (tmp_path / "policy.yaml").write_text(POLICY.replace("SECONDS", "7"))
    short = Path(tempfile.mkdtemp(prefix="kvt-"))  # for a socket
    given = {
        "policy": tmp_path / "policy.yaml",
        "run_dir": short,
        "state_dir": tmp_path / "state",
        "shm_dir": tmp_path,
        "http": "127.0.0.1:0",
        "device": "cpu",
        "l0": "engine",
        "poll_seconds": 0.2,
        "look_seconds": 0.5,
    }
    made = Agent(read_settings(AgentSettings, given))
    try:
        made.start()
        yield made
    finally:
        made.stop()
        shutil.rmtree(short)


def test_it_is_for_the_next_process_and_no_revision_is_refused_for_it(
    agent: Agent, tmp_path: Path
) -> None:
    control = agent.control
    assert control is not None
    first = control.view
    assert first.refusal is None
    assert first.budgets is not None
    assert first.budgets.l1 == 32 * MI
    assert [clamp.reason for clamp in first.budgets.clamps] == [Reason.SharedMemory]
    (tmp_path / "policy.yaml").write_text(POLICY.replace("SECONDS", "8"))
    end = time.monotonic() + 30.0
    while control.view.in_force == first.in_force:
        assert time.monotonic() < end, control.view.refusal
        time.sleep(0.05)
    assert control.view.refusal is None
