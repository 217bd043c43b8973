"""KVTierNode specs written by hand (no operator here), and the node side of an agent over tiers
that only remember, for what is about the API server and not about pages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from controlplane.testing import Kube
from kvtier_agent.cache.settings import Behaviour
from kvtier_agent.node.budgets import NodeBudgets
from kvtier_agent.node.cluster import Cluster
from kvtier_agent.node.control import Control
from kvtier_agent.node.facts import Device, Facts, MemoryLimit
from kvtier_agent.node.status import make_status, previous_conditions
from kvtier_agent.supervise import Supervisor
from kvtier_api.policy import RevisionSpec
from kvtier_api.revision import revision_hash
from kvtier_api.validate import parse

GI = 1 << 30


@pytest.fixture
def ktn(kube: Kube) -> Callable[..., str]:
    """Writes a KVTierNode's spec as the operator does; returns the revision's hash ("" = none)."""

    def write(
        name: str,
        sections: dict[str, Any] | None,
        *,
        interval: int = 10,
        grace: int = 3600,
        revision: str | None = None,
    ) -> str:
        spec: dict[str, Any] = {"reportIntervalSeconds": interval, "orphanGraceSeconds": grace}
        if sections is not None:
            parsed = parse(RevisionSpec, {"valueDensity": {"model": "classic"}, **sections})
            revision = revision or revision_hash(parsed)
            spec["policy"] = {"name": "some-policy", "uid": "u-1", "generation": 1}
            spec["stable"] = {"revision": revision, "spec": parsed.to_dict()}
        kube.apply(
            {
                "apiVersion": "kvtier.io/v1alpha1",
                "kind": "KVTierNode",
                "metadata": {"name": name},
                "spec": spec,
            }
        )
        return revision or ""

    return write


@dataclass
class NodeSide:
    """A `Control` and a `Cluster` under one supervisor, as in the agent's process."""

    control: Control
    cluster: Cluster
    supervisor: Supervisor
    behaviour: Behaviour | None = None
    budgets: NodeBudgets | None = None
    drops: list[float] = field(default_factory=list)


class _Tiers:
    def __init__(self) -> None:
        self.owner: NodeSide | None = None

    def prepare(
        self, behaviour: Behaviour, budgets: NodeBudgets, progress: Callable[[], None]
    ) -> None:
        pass

    def reconfigure(self, behaviour: Behaviour, budgets: NodeBudgets) -> None:
        assert self.owner is not None
        self.owner.behaviour, self.owner.budgets = behaviour, budgets

    def drop(self) -> None:
        assert self.owner is not None
        self.owner.drops.append(time.monotonic())


@pytest.fixture
def node_side(admin_kubeconfig: Path) -> Iterator[Callable[..., NodeSide]]:
    """Starts the node side of an agent for a node name; ended with the test."""
    started: list[NodeSide] = []
    count = 0

    def start(name: str, *, kubeconfig: Path | None = None) -> NodeSide:
        nonlocal count
        count += 1
        boot = f"boot-{count}"
        facts = Facts(
            "owned", Device("cuda", (80 * GI,)), MemoryLimit(400 * GI, "a limit"), 400 * GI
        )
        tiers = _Tiers()
        control = Control(tiers, lambda: facts)

        def build(present: Any) -> dict[str, Any]:
            return make_status(
                replace(control.view, rival=cluster.rival()),
                (),
                {"misses": int(time.monotonic() * 1000)},
                previous_conditions(present),
                wall=time.time(),
                version="test",
                boot_id=boot,
            )

        cluster = Cluster(name, kubeconfig or admin_kubeconfig, control, build)
        control.changed = cluster.wake
        side = NodeSide(control, cluster, Supervisor())
        tiers.owner = side
        side.supervisor.start("control", control.run)
        side.supervisor.start("kubernetes", cluster.run)
        started.append(side)
        return side

    yield start
    for side in started:
        late = side.supervisor.stop(10.0)
        assert late == []
    assert not [t.name for t in threading.enumerate() if t.name in ("control", "kubernetes")]
