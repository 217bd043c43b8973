"""A control plane of its own with the chart installed by helm, as an administrator would.

Not the shared one: the chart brings the API types itself, and uninstalls are tested.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from controlplane import ControlPlane
from controlplane.testing import Kube

ROOT = Path(__file__).parents[3]
CHART = ROOT / "charts" / "kvtier"
NAMESPACE = "kvtier-system"


@dataclass(frozen=True)
class Cluster:
    """A control plane and helm pointed at it."""

    plane: ControlPlane
    kube: Kube
    program: Path
    home: Path

    def helm(
        self, *arguments: str, values: dict[str, Any] | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(self.program), *arguments, *(["--values", "-"] if values is not None else [])],
            input="" if values is None else json.dumps(values),
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
            env={
                **os.environ,
                "KUBECONFIG": str(self.plane.kubeconfig),
                "HELM_CACHE_HOME": str(self.home / "cache"),
                "HELM_CONFIG_HOME": str(self.home / "config"),
                "HELM_DATA_HOME": str(self.home / "data"),
            },
        )
        if check:
            assert done.returncode == 0, done.stderr
        return done

    def install(self, values: dict[str, Any] | None = None) -> None:
        self.helm(
            *("install", "kvtier", str(CHART), "--namespace", NAMESPACE, "--create-namespace"),
            values=values or {},
        )


def start(folder: Path, helm: Path) -> Iterator[Cluster]:
    with ControlPlane(folder / "plane") as plane:
        kube = Kube(plane)
        try:
            yield Cluster(plane, kube, helm, folder / "helm")
        finally:
            kube.api.close()


@pytest.fixture
def bare(tmp_path: Path, helm: Path) -> Iterator[Cluster]:
    """An empty control plane, for one test."""
    yield from start(tmp_path, helm)


@pytest.fixture(scope="package")
def installed(tmp_path_factory: pytest.TempPathFactory, helm: Path) -> Iterator[Cluster]:
    """One with the chart in it, for tests that leave it as it is."""
    for cluster in start(tmp_path_factory.mktemp("chart"), helm):
        cluster.install(
            {
                "volumes": [{"name": "data0", "hostPath": "/mnt/data0"}],
                "domains": [{"name": "default", "gid": 23000}],
            }
        )
        yield cluster
