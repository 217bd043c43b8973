"""The chart as helm renders it, without a cluster.

helm and promtool are built by `make tools`; where one cannot be built these tests fail and say why.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from controlplane import tool_path

Object = dict[str, Any]
ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Rendered:
    """Objects of one `helm template`; `error` is what helm said when it refused."""

    objects: tuple[Object, ...]
    error: str = ""

    def of_kind(self, kind: str) -> list[Object]:
        return [o for o in self.objects if o["kind"] == kind]

    def one(self, kind: str) -> Object:
        (found,) = self.of_kind(kind)
        return found

    @property
    def pods(self) -> dict[str, Object]:
        """Pod spec of each workload, by kind."""
        return {
            o["kind"]: o["spec"]["template"]["spec"]
            for o in self.objects
            if o["kind"] in ("Deployment", "DaemonSet")
        }


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def chart() -> Path:
    return ROOT / "charts" / "kvtier"


@pytest.fixture(scope="session")
def helm() -> Path:
    return tool_path("helm")


@pytest.fixture(scope="session")
def promtool() -> Path:
    return tool_path("promtool")


@pytest.fixture(scope="session")
def render(
    helm: Path, chart: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Rendered]:
    """render({values}) -> Rendered; render(..., refused=True) expects helm to say no."""
    home = tmp_path_factory.mktemp("helm")
    environment = {
        **os.environ,
        "HELM_CACHE_HOME": str(home / "cache"),
        "HELM_CONFIG_HOME": str(home / "config"),
        "HELM_DATA_HOME": str(home / "data"),
    }

    def run(values: Mapping[str, Any] | None = None, *, refused: bool = False) -> Rendered:
        done = subprocess.run(
            [
                *(str(helm), "template", "kvtier", str(chart)),
                *("--namespace", "kvtier-system", "--kube-version", "1.36.0", "--values", "-"),
            ],
            input=json.dumps(values or {}),
            capture_output=True,
            text=True,
            timeout=60,
            env=environment,
            check=False,
        )
        if refused:
            assert done.returncode != 0, "helm rendered values that it should refuse"
            return Rendered((), done.stderr)
        assert done.returncode == 0, done.stderr
        return Rendered(tuple(o for o in yaml.safe_load_all(done.stdout) if o))

    return run
