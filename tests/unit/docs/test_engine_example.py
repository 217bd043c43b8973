"""The engine of the user's guide works as printed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_process import AgentProcess

PAGE = Path(__file__).parents[3] / "docs" / "user" / "engines.md"
POLICY = """
apiVersion: kvtier.io/v1alpha1
kind: KVTierPolicy
metadata: {name: guide}
spec:
  tiers: {hbm: {size: 256Mi}, dram: {size: 256Mi}}
  valueDensity: {model: classic}
"""
TOKENS = 600
"""Two whole pages and a part of one."""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    with AgentProcess(tmp_path, policy=POLICY) as running:
        yield running.ready()


def run(agent: AgentProcess, new_pages: int) -> dict[str, Any]:
    """One request, with what an engine would bring; the names that the example leaves."""
    found = re.search(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert found is not None
    text = found[1].replace("/run/kvtier/default.sock", str(agent.socket))
    page_bytes = 2 * 32 * 8 * 128 * 2 * 256
    names: dict[str, Any] = {
        "prompt_tokens": np.arange(TOKENS, dtype=np.uint32),
        "pages": np.zeros((3, page_bytes), np.uint8),
        "new_pages": np.full((new_pages, page_bytes), 7, np.uint8),
    }
    exec(text, names)
    return names


def test_what_the_first_request_computed_the_second_one_loads(agent: AgentProcess) -> None:
    first = run(agent, new_pages=3)
    assert (first["found"].load, first["n"]) == (0, 0)
    second = run(agent, new_pages=0)
    assert (second["found"].load, second["n"]) == (3, 3)
    assert (second["pages"] == 7).all()
