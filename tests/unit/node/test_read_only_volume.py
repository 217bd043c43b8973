"""An agent that starts with a read-only volume beside a healthy one serves, and says so."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_process import AgentProcess
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.server.client import Client

POLICY = """
apiVersion: kvtier.io/v1alpha1
kind: KVTierPolicy
metadata: {name: alone}
spec:
  tiers: {hbm: {size: 4Mi}, dram: {size: 8Mi},
    nvme: {size: 8Mi, volumes: [data0, data1], reservePercent: 0}}
  valueDensity: {model: classic}
"""


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "data1"
    folder.mkdir()
    options = ("-t", "tmpfs", "-o", "ro,size=64m", "kvtier-test", str(folder))
    if subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_it_clamps_and_joins_when_it_is_mounted_read_write(tmp_path: Path, read_only: Path) -> None:
    with AgentProcess(tmp_path, "--volume", f"data1={read_only}", policy=POLICY) as agent:
        agent.ready()
        agent.until(
            lambda: agent.condition("Clamped")[:2] == ("True", "VolumeReadOnly"), "it is said"
        )
        assert "volume data1 being read-only" in agent.condition("Clamped")[2]
        assert agent.condition("Ready")[:2] == ("True", "InForce")
        trouble = 'kv_volume_trouble{domain="default",reason="VolumeReadOnly",volume="data1"}'
        with Client(agent.socket, Geometry.of_page_bytes(65536, 256), timeout_seconds=10) as client:
            assert client.wait_connected(30)
            agent.until(lambda: f"{trouble} 1.0" in agent.get("/metrics")[1], "it is a metric")
            subprocess.run(["mount", "-o", "remount,rw", str(read_only)], check=True)
            agent.until(lambda: agent.condition("Clamped")[0] == "False", "it joins")
            agent.until(lambda: f"{trouble} 0.0" in agent.get("/metrics")[1], "and is well")
    assert (read_only / "kvtier" / "default" / "layout.json").exists()
