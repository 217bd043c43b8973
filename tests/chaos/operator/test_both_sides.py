"""An API server that goes away under a whole node: operator, agent and a client in traffic."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from agent_process import AgentProcess
from controlplane.testing import Kube
from page_traffic import Traffic

NODE = "node-a"


def put_policy(kube: Kube, dram: str) -> None:
    kube.apply(
        {
            "apiVersion": "kvtier.io/v1alpha1",
            "kind": "KVTierPolicy",
            "metadata": {"name": "served"},
            "spec": {
                "nodeSelector": {"matchLabels": {"gpu": "x"}},
                "valueDensity": {"model": "classic"},
                "tiers": {
                    "hbm": {"size": "8Mi"},
                    "dram": {"size": dram},
                    "nvme": {"size": "64Mi", "volumes": ["data0"]},
                },
            },
        }
    )


def dram_in_force(kube: Kube, agent: AgentProcess) -> int:
    """Bytes of the tier in the agent, once both sides say that all is in force."""
    served, node = kube.get("kvtierpolicies", "served"), kube.get("kvtiernodes", NODE)
    told = served.get("status", {})
    assert told["observedGeneration"] == served["metadata"]["generation"]
    assert [c["status"] for c in told["conditions"] if c["type"] == "Ready"] == ["True"]
    assert told["desiredRevision"] == node["status"]["revision"]
    sizes = {t["name"]: int(t["capacityBytes"]) for t in agent.status()["tiers"]}
    return sizes.get("dram", 0)


@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.timeout(400)
def test_nobody_fails_and_both_sides_catch_up(
    new_cluster: Any, new_operator: Any, tmp_path: Path, seconds: int
) -> None:
    kube: Kube = new_cluster("outage")
    kube.apply(
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE, "labels": {"gpu": "x"}}}
    )
    put_policy(kube, "16Mi")
    operator = new_operator(kube)
    options = ("--node-name", NODE, "--kubeconfig", str(kube.plane.kubeconfig))
    with AgentProcess(tmp_path, *options) as agent, Traffic(agent.ready()) as traffic:
        kube.eventually(lambda: dram_in_force(kube, agent) == 16 << 20, what="in force", timeout=60)
        agent.until(lambda: traffic.loads > 50, "pages go in and out")
        # Whether the operator still passes this one on is left to chance: both must do.
        put_policy(kube, "20Mi")
        kube.plane.stop_apiserver(kill=True)
        before = traffic.loads
        time.sleep(seconds)
        during = traffic.loads - before
        assert agent.get("/healthz") == (200, "ok\n")
        assert operator.process is not None
        assert operator.process.poll() is None
        assert operator.probe("/healthz")[0] == 200
        kube.plane.start_apiserver()
        put_policy(kube, "24Mi")
        kube.eventually(
            lambda: dram_in_force(kube, agent) == 24 << 20, what="caught up", timeout=60
        )
        kube.eventually(lambda: operator.probe("/readyz")[0] == 200, what="ready", timeout=30)
    assert (traffic.errors, traffic.wrong) == ([], 0)
    assert during > 20 * seconds
    assert kube.get("kvtierpolicies", "served")["status"]["nodes"]["updated"] == 1
