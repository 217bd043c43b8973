"""The tools beside the API server: each runs, and says the version that go.mod pins."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from controlplane import ControlPlane
from controlplane.api import Object
from controlplane.catalog import TOOLS
from controlplane.testing import Kube


def said(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_helm_is_the_pinned_one(helm: Path) -> None:
    assert TOOLS["helm"].accepts(said(helm, "version", "--short"))


def test_promtool_is_the_pinned_one(promtool: Path) -> None:
    assert TOOLS["promtool"].accepts(said(promtool, "--version"))


def fake_node(name: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "annotations": {"kwok.x-k8s.io/node": "fake"}},
    }


@pytest.mark.slow
def test_controllers_scheduler_and_kwok_play_a_cluster(full_control_plane: ControlPlane) -> None:
    kube = Kube(full_control_plane)
    labels = {"app": "agent"}
    container = {"name": "agent", "image": "example.org/agent"}
    kube.apply(*(fake_node(f"node-{i}") for i in range(3)))
    kube.apply(
        {
            "apiVersion": "apps/v1",
            "kind": "DaemonSet",
            "metadata": {"name": "agent"},
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
            },
        }
    )

    def ready() -> bool:
        status = kube.get("daemonsets", "agent").get("status", {})
        return bool(status.get("numberReady") == 3)

    kube.eventually(ready, what="a Pod of the DaemonSet is ready on each node", timeout=60)

    owner = kube.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "owner"}, "data": {}}
    )[0]
    reference = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "name": "owner",
        "uid": owner["metadata"]["uid"],
    }
    kube.apply(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "owned", "ownerReferences": [reference]},
        }
    )
    kube.delete("configmaps", "owner")
    kube.eventually(
        lambda: kube.find("configmaps", "owned") is None, what="the owned object is collected"
    )
    full_control_plane.check()
