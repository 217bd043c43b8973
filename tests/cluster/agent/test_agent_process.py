"""A whole agent under the real API server: pages are served whatever happens to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_process import AgentProcess
from controlplane import ControlPlane
from controlplane.testing import Kube
from kvtier_agent.cache.identity import chain_keys
from kvtier_agent.server.client import Client, Stored
from page_traffic import GEOMETRY, Traffic

Make = Callable[..., Any]


def sections(dram: str) -> dict[str, Any]:
    return {
        "tiers": {
            "hbm": {"size": "8Mi"},
            "dram": {"size": dram},
            "nvme": {"size": "64Mi", "volumes": ["data0"]},
        }
    }


@pytest.fixture
def agent_on(tmp_path: Path, control_plane: ControlPlane) -> Iterator[Callable[..., AgentProcess]]:
    """Starts an agent process for a node name, as the user given or as the administrator."""
    running: list[AgentProcess] = []

    def start(name: str, kubeconfig: Path | None = None) -> AgentProcess:
        made = AgentProcess(
            tmp_path,
            *("--node-name", name),
            *("--kubeconfig", str(kubeconfig or control_plane.kubeconfig)),
        )
        running.append(made)
        return made.start()

    yield start
    for made in running:
        made.__exit__(None, None, None)


def status(kube: Kube, name: str) -> dict[str, Any]:
    return (kube.find("ktn", name) or {}).get("status") or {}


@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_an_outage_of_the_api_server_fails_no_request(
    kube: Kube, control_plane: ControlPlane, ktn: Make, agent_on: Make, seconds: int
) -> None:
    revision = ktn("node-a", sections("16Mi"))
    agent = agent_on("node-a").ready()
    kube.eventually(
        lambda: status(kube, "node-a").get("revision") == revision, what="in force", timeout=30
    )
    with Traffic(agent) as traffic:
        control_plane.stop_apiserver()
        time.sleep(seconds)
        during = traffic.loads
        assert agent.get("/healthz") == (200, "ok\n")
        control_plane.start_apiserver()
        edited = kube.eventually(
            lambda: ktn("node-a", sections("24Mi")), what="the API server takes the edit"
        )
        kube.eventually(
            lambda: status(kube, "node-a").get("revision") == edited, what="caught up", timeout=20
        )
        assert status(kube, "node-a")["counters"]["hitsL0"] > 0
    assert traffic.errors == []
    assert traffic.wrong == 0
    assert during > 100


def test_a_start_without_an_api_server_serves_the_last_good_revision(
    kube: Kube, control_plane: ControlPlane, ktn: Make, agent_on: Make
) -> None:
    revision = ktn("node-b", sections("16Mi"))
    agent = agent_on("node-b").ready()
    kube.eventually(
        lambda: status(kube, "node-b").get("revision") == revision, what="in force", timeout=30
    )
    assert agent.stop() == 0
    assert [c["reason"] for c in status(kube, "node-b")["conditions"] if c["type"] == "Ready"] == [
        "Stopping"
    ]
    control_plane.stop_apiserver()
    agent.start().ready()
    agent.until(
        lambda: agent.condition("Ready")[:2] == ("True", "InForce"), "the last good one serves"
    )
    assert agent.status()["revision"] == revision
    with Traffic(agent) as traffic:
        agent.until(lambda: traffic.loads > 50, "pages go in and out")
        control_plane.start_apiserver()
        edited = kube.eventually(
            lambda: ktn("node-b", sections("24Mi")), what="the API server takes the edit"
        )
        kube.eventually(
            lambda: status(kube, "node-b").get("revision") == edited, what="caught up", timeout=20
        )
    assert (traffic.errors, traffic.wrong) == ([], 0)


def test_without_a_policy_pages_are_served_but_not_taken_and_then_dropped(
    kube: Kube, ktn: Make, agent_on: Make
) -> None:
    revision = ktn("node-c", sections("16Mi"), grace=8)
    agent = agent_on("node-c").ready()
    kube.eventually(
        lambda: status(kube, "node-c").get("revision") == revision, what="in force", timeout=30
    )
    with Client(agent.socket, GEOMETRY, timeout_seconds=5.0) as client:
        assert client.wait_connected(20.0)
        keys = chain_keys(client.root, np.arange(2048, dtype=np.uint32), 256)
        pages = np.arange(8, dtype=np.uint8)[:, None].repeat(GEOMETRY.page_bytes, axis=1)
        assert client.put(keys[:4], pages[:4]).stored == 4

        ktn("node-c", None, grace=8)
        agent.until(lambda: agent.condition("Ready")[1] == "NoPolicy", "NoPolicy")
        copy = np.zeros_like(pages)
        with client.load(keys[:4]) as lease:
            assert lease.copy_to(copy[:4]).all()
        assert np.array_equal(copy[:4], pages[:4])
        refused = client.put(keys[4:], pages[4:])
        assert (refused.status == Stored.REFUSED_CLOSED).all()

        ktn("node-c", sections("16Mi"), grace=8)
        agent.until(lambda: agent.condition("Ready")[1] == "InForce", "back")
        assert client.lookup(keys).prefix == 4, "as if nothing had been"
        assert client.put(keys[4:], pages[4:]).stored == 4

        ktn("node-c", None, grace=2)
        agent.until(lambda: client.lookup(keys).prefix == 0, "dropped after the grace")
        agent.until(
            lambda: all(t["pages"] == 0 for t in agent.status()["tiers"]), "nothing is held"
        )
        ktn("node-c", sections("16Mi"))
        agent.until(lambda: client.put(keys, pages).stored == 8, "a new policy starts over")


def test_the_agent_needs_these_permissions_and_no_others(
    kube: Kube, control_plane: ControlPlane, ktn: Make, agent_on: Make
) -> None:
    rules = [
        {"apiGroups": ["kvtier.io"], "resources": ["kvtiernodes"], "verbs": ["list", "watch"]},
        {"apiGroups": ["kvtier.io"], "resources": ["kvtiernodes/status"], "verbs": ["patch"]},
    ]
    rbac = "rbac.authorization.k8s.io/v1"
    role = {"name": "agent-of-the-test"}
    kube.apply(
        {"apiVersion": rbac, "kind": "ClusterRole", "metadata": role, "rules": rules},
        {
            "apiVersion": rbac,
            "kind": "ClusterRoleBinding",
            "metadata": role,
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", **role},
            "subjects": [
                {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "an-agent"}
            ],
        },
    )
    revision = ktn("node-d", sections("16Mi"))
    agent_on("node-d", control_plane.user_kubeconfig("an-agent")).ready()
    kube.eventually(
        lambda: status(kube, "node-d").get("revision") == revision, what="in force", timeout=30
    )
