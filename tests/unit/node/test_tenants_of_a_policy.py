"""A policy's quotas in a whole agent: in force, edited live, kept by the agent that follows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from agent_process import AgentProcess
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.server.client import Client, Stored

GEOMETRY = Geometry.of_page_bytes(64 * 1024, 256)


def policy(quota: str) -> str:
    return f"""
apiVersion: kvtier.io/v1alpha1
kind: KVTierPolicy
metadata: {{name: alone}}
spec:
  tiers: {{hbm: {{size: 1Mi}}, dram: {{size: 8Mi}}}}
  valueDensity: {{model: classic}}
{quota}"""


BOUND = "  tenants: {quotas: [{tenant: search, hbmPercent: 0, dramPercent: 10}]}\n"
"""12 of DRAM's 128 pages."""


def put(client: Client, seed: int, count: int) -> list[int]:
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 256, (count, 16), dtype=np.uint8)
    pages = rng.integers(0, 256, (count, GEOMETRY.page_bytes), dtype=np.uint8)
    return client.put(keys, pages).status.tolist()


def connect(agent: AgentProcess, tenant: str) -> Client:
    client = Client(agent.socket, GEOMETRY, tenant=tenant, timeout_seconds=10.0)
    assert client.wait_connected(20.0), client.counters.last_error
    return client


def test_a_quota_holds_through_an_edit_and_a_restart(tmp_path: Path) -> None:
    with AgentProcess(tmp_path, policy=policy(BOUND)) as agent:
        agent.ready()
        with connect(agent, "search") as search, connect(agent, "chat") as chat:
            status = put(search, 1, 16)
            assert status == [Stored.STORED] * 12 + [Stored.REFUSED_QUOTA] * 4
            assert put(chat, 2, 40) == [Stored.STORED] * 40
            agent.write_policy(policy(""))
            agent.until(lambda: search.stats()["tenants"] == {}, "the edit is in force")
            assert put(search, 3, 16) == [Stored.STORED] * 16
            agent.write_policy(policy(BOUND))
            agent.until(lambda: search.stats()["tenants"], "the quota is in force again")
            # Without an L2 what is too much is dropped at once, and only the tenant's own.
            used = search.stats()["tenants"]["search"]["used_bytes"]
            assert used[1] <= 12 * GEOMETRY.slot_bytes
        agent.stop()
        agent.start()
        agent.ready()
        with connect(agent, "search") as search:
            told = search.stats()["tenants"]["search"]
            assert 0 < told["used_bytes"][1] <= told["quota_bytes"][1]
            assert put(search, 4, 4) == [Stored.STORED] * 4  # in place of its coldest
            told = search.stats()["tenants"]["search"]
            assert told["used_bytes"][1] <= told["quota_bytes"][1] == 12 * GEOMETRY.slot_bytes
