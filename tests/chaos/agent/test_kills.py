"""An agent that is killed again and again under traffic: no wrong byte, no state that will not
start, no counter that goes back."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from agent_process import AgentProcess
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.identity import chain_keys
from kvtier_agent.server.client import Client

POLICY = """
apiVersion: kvtier.io/v1alpha1
kind: KVTierPolicy
metadata: {{name: chaos}}
spec:
  tiers: {{hbm: {{size: 4Mi}}, dram: {{size: {dram}Mi}}, nvme: {{size: 64Mi, volumes: [data0]}}}}
  valueDensity: {{model: classic}}
"""
GEOMETRY = Geometry.of_page_bytes(64 * 1024, 256)
CHAINS, PAGES = 40, 8


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_kills_under_traffic(tmp_path: Path, kills: int) -> None:
    chance = random.Random(kills)
    right = held = 0
    with AgentProcess(tmp_path, policy=POLICY.format(dram=8)) as agent:
        agent.ready()
        client = Client(agent.socket, GEOMETRY, timeout_seconds=2.0)
        with client:
            stored = 0
            for kill in range(kills + 1):
                agent.until(client.ping, "the client is connected", timeout=60.0)
                end = time.monotonic() + chance.uniform(0.5, 3.0)
                while time.monotonic() < end:
                    chain = chance.randrange(CHAINS)
                    tokens = np.arange(PAGES * 256, dtype=np.uint32) + np.uint32(chain << 16)
                    keys = chain_keys(client.root, tokens, 256)
                    pages = np.full((PAGES, GEOMETRY.page_bytes), chain, np.uint8)
                    copy = np.zeros_like(pages)
                    with client.load(keys) as lease:
                        good = lease.copy_to(copy)
                    held += int(good.sum())
                    right += int((copy[good] == chain).all(axis=1).sum())
                    client.put(keys, pages)
                if kill == kills:
                    break
                now = agent.status().get("counters", {}).get("pagesStored", 0)
                assert now >= stored, "counters never go back"
                stored = now
                agent.write_policy(POLICY.format(dram=8 + kill % 3))
                assert agent.stop(signal.SIGKILL) == -signal.SIGKILL
                agent.start().ready()
            assert agent.get("/healthz") == (200, "ok\n")
            assert agent.condition("Ready")[:2] == ("True", "InForce")
        assert agent.stop() == 0
    assert held > 0
    assert right == held, "every page that came back verified has its own bytes"
