"""The fixture ``kube``: CRDs in place, and nothing left behind."""

from __future__ import annotations

from typing import Any

import pytest
from controlplane import ControlPlane
from controlplane.api import ApiError
from controlplane.testing import Kube, Sweeper, eventually


def config_map(name: str, namespace: str = "default", **metadata: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": namespace, **metadata},
    }


def test_kvtier_resources_are_served(kube: Kube) -> None:
    assert kube.list("kvtierpolicies") == []
    assert kube.list("ktn") == []
    explained = kube.explain("ktp.spec")
    assert "kvtier.io" in explained


def test_sweep_takes_away_what_a_test_made_and_nothing_else(kube: Kube) -> None:
    kube.apply(config_map("before"))
    sweeper = Sweeper(kube)
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "made"}})
    kube.apply(
        config_map("made", "made", finalizers=["example.org/stuck"]),
        config_map("made"),
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "made"}},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": "made"},
            "rules": [],
        },
    )

    sweeper.sweep()

    assert kube.find("configmaps", "before") is not None
    assert kube.find("configmaps", "made") is None
    assert kube.find("nodes", "made") is None
    assert kube.find("clusterroles", "made") is None
    assert kube.find("namespaces", "made") is None


def test_a_changed_crd_is_put_back(kube: Kube, control_plane: ControlPlane) -> None:
    name = "customresourcedefinitions/kvtiernodes.kvtier.io"
    before = kube.kubectl("get", name, "-o", "jsonpath={.spec}").stdout
    patch = '[{"op": "add", "path": "/spec/names/shortNames/-", "value": "changed"}]'
    kube.kubectl("patch", name, "--type=json", "-p", patch)
    original = kube.get("customresourcedefinitions", "kvtierpolicies.kvtier.io")
    assert kube.kubectl("get", name, "-o", "jsonpath={.spec}").stdout != before

    crd = kube.get("customresourcedefinitions", "kvtiernodes.kvtier.io")
    clean = {
        "apiVersion": crd["apiVersion"],
        "kind": crd["kind"],
        "metadata": {"name": crd["metadata"]["name"]},
        "spec": crd["spec"],
    }
    clean["spec"]["names"]["shortNames"].remove("changed")
    kube.define([clean])

    assert kube.kubectl("get", name, "-o", "jsonpath={.spec}").stdout == before
    untouched = kube.get("customresourcedefinitions", "kvtierpolicies.kvtier.io")
    assert untouched["metadata"]["uid"] == original["metadata"]["uid"]


def test_eventually_says_what_it_waited_for() -> None:
    calls = iter([0, 0, 7])
    assert eventually(lambda: next(calls), what="seven") == 7
    with pytest.raises(AssertionError, match=r"not within 0\.1 s: never; at last: False"):
        eventually(lambda: False, what="never", timeout=0.1)


def test_a_refusal_has_the_sentence_of_the_server(kube: Kube) -> None:
    with pytest.raises(ApiError, match="not found") as refused:
        kube.get("configmaps", "absent")
    assert refused.value.status == 404
