"""A control plane of its own for tests that stop it, with the same operator process and agents as
the cluster tests."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from controlplane import ControlPlane
from controlplane.testing import Kube

TESTS = Path(__file__).parents[2]
CRDS = TESTS.parent / "crds"


def _stage() -> ModuleType:
    """The helpers of the cluster tests; a conftest is no module that can be imported by name."""
    name = "kvtier_operator_stage"
    if name not in sys.modules:
        path = TESTS / "cluster" / "operator" / "conftest.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture
def new_cluster(tmp_path: Path) -> Iterator[Callable[[str], Kube]]:
    """``new_cluster(name)``: a fresh API server with kvtier's CRDs and the operator's rights."""
    planes: list[ControlPlane] = []

    def make(name: str) -> Kube:
        plane = ControlPlane(tmp_path / name)
        plane.start()
        planes.append(plane)
        kube = Kube(plane)
        kube.define(yaml.safe_load(path.read_text()) for path in sorted(CRDS.glob("*.yaml")))
        _stage().grant(kube)
        return kube

    yield make
    for plane in planes:
        plane.stop()


@pytest.fixture
def new_operator(tmp_path: Path) -> Iterator[Callable[[Kube], Any]]:
    """``new_operator(kube)``: an operator process that has listed everything."""
    stage, made = _stage(), list[Any]()

    def make(kube: Kube) -> Any:
        kubeconfig = kube.plane.user_kubeconfig(stage.USER)
        process = stage.OperatorProcess(kubeconfig, tmp_path / f"operator-{len(made)}.log", ())
        process.start()
        made.append(process)
        kube.eventually(lambda: process.said("synced"), what="synced", timeout=60)
        return process

    yield make
    for process in made:
        process.kill()


@pytest.fixture
def new_agents() -> Iterator[Callable[[Kube], Any]]:
    """``new_agents(kube)``: agents on every node that has a KVTierNode."""
    made: list[Any] = []

    def make(kube: Kube) -> Any:
        agents = _stage().Agents(Kube(kube.plane))
        agents.start()
        made.append(agents)
        return agents

    yield make
    for agents in made:
        agents.stop()
