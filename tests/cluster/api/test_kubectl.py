"""What a person sees of the API with kubectl."""

from __future__ import annotations

import re
from typing import Any

import pytest
from controlplane.api import ApiError
from controlplane.testing import Kube
from kvtier_api import KVTierNode, KVTierPolicy, Reason
from kvtier_api.conditions import with_condition
from kvtier_api.crd import schema
from kvtier_api.node import Counters, NodeStatus, TierStatus
from kvtier_api.policy import NodeCounts, PolicyStatus
from specgen import policy

SPEC: dict[str, Any] = {"valueDensity": {"model": "classic"}, "priority": 7}
HASH = "0123456789abcdef" * 4


def sections(node: dict[str, Any], path: str) -> dict[str, set[str]]:
    """Path of a section -> names of its fields."""
    node = node.get("items", node)
    if "properties" not in node:
        return {}
    found = {path: set(node["properties"])}
    for name, child in node["properties"].items():
        found |= sections(child, f"{path}.{name}")
    return found


@pytest.mark.parametrize(("short", "kind"), [("ktp", KVTierPolicy), ("ktn", KVTierNode)])
def test_explain_tells_unit_and_default_of_every_field(kube: Kube, short: str, kind: Any) -> None:
    for path, names in sections(schema(kind)["properties"]["spec"], f"{short}.spec").items():
        if ".stable.spec." in path:
            continue  # the same sections as those of a policy
        text = kube.explain(path)
        fields = text.partition("FIELDS:\n")[2]
        told = dict(re.findall(r"^  (\w+)\t(.*?)(?=^  \w+\t|\Z)", fields, re.M | re.S))
        assert set(told) == names, path
        for name, about in told.items():
            assert "Unit" in about, f"{path}.{name}"
            assert "efault" in about, f"{path}.{name}"


def test_tables_show_state(kube: Kube) -> None:
    kube.apply(policy(SPEC, "llama"))
    status = PolicyStatus(
        observed_generation=1,
        active_revision=HASH,
        desired_revision=HASH,
        nodes=NodeCounts(selected=3, ready=2, updated=3),
        conditions=with_condition(
            (), "Ready", "False", Reason.NodesNotReady, "one is not", now=0, generation=1
        ),
    )
    head = {"apiVersion": "kvtier.io/v1alpha1", "metadata": {"name": "llama"}}
    kube.apply_status({**head, "kind": "KVTierPolicy", "status": status.to_dict()})
    header, row = kube.kubectl("get", "ktp").stdout.splitlines()
    assert header.split() == ["NAME", "READY", "REASON", "REVISION", "NODES", "AGE"]
    assert row.split()[:5] == ["llama", "False", "NodesNotReady", "0123456789", "2/3"]

    kube.apply(
        {
            "apiVersion": "kvtier.io/v1alpha1",
            "kind": "KVTierNode",
            "metadata": {"name": "node-a"},
            "spec": {"policy": {"name": "llama", "uid": "u", "generation": 1}},
        }
    )
    told = NodeStatus(
        observed_generation=1,
        revision=HASH,
        tiers=(
            TierStatus(name="hbm", capacity_bytes=2**34, used_bytes=2**33, pages=9),
            TierStatus(name="dram", capacity_bytes=100, used_bytes=7),
        ),
        counters=Counters(hits_l0=2**62),
        conditions=with_condition((), "Ready", "True", Reason.InForce, "yes", now=0),
    )
    kube.apply_status(
        {
            "apiVersion": "kvtier.io/v1alpha1",
            "kind": "KVTierNode",
            "metadata": {"name": "node-a"},
            "status": told.to_dict(),
        }
    )
    header, row = kube.kubectl("get", "ktn").stdout.splitlines()
    assert header.split() == ["NAME", "POLICY", "REVISION", "READY", "L0%", "L1%", "L2%", "AGE"]
    assert row.split()[:6] == ["node-a", "llama", "0123456789", "True", "50", "7"]
    assert KVTierNode.read(kube.get("ktn", "node-a")).status == told
    both = kube.kubectl("get", "kvtier", "-o", "name").stdout.split()
    assert both == ["kvtiernode.kvtier.io/node-a", "kvtierpolicy.kvtier.io/llama"]


def test_a_new_object_has_not_been_observed(kube: Kube) -> None:
    """Tools that wait for readiness must not take silence for it."""
    (stored,) = kube.apply({**policy(SPEC), "status": {"observedGeneration": 1}})
    assert stored["status"]["observedGeneration"] == -1
    assert KVTierPolicy.read(stored).status == PolicyStatus()


def test_status_is_a_resource_of_its_own(kube: Kube) -> None:
    kube.apply(policy(SPEC))
    kube.apply_status(
        {
            **policy({}),
            "spec": {"valueDensity": {"model": "classic"}, "priority": 9},
            "status": {"observedGeneration": 1},
        }
    )
    stored = KVTierPolicy.read(kube.get("ktp", "generated"))
    assert stored.spec.priority == 7
    assert stored.status.observed_generation == 1
    assert stored.metadata.generation == 1


def test_conditions_of_two_writers_stand_side_by_side(kube: Kube) -> None:
    kube.apply(policy(SPEC))
    path = "/apis/kvtier.io/v1alpha1/kvtierpolicies/generated/status"
    for manager, type_ in (("one", "Ready"), ("two", "Stalled"), ("one", "Ready")):
        conditions = with_condition((), type_, "False", Reason.RollingOut, "", now=0)
        kube.api.apply(
            path,
            {
                "apiVersion": "kvtier.io/v1alpha1",
                "kind": "KVTierPolicy",
                "metadata": {"name": "generated"},
                "status": {"conditions": [c.to_dict() for c in conditions]},
            },
            manager=manager,
        )
    status = KVTierPolicy.read(kube.get("ktp", "generated")).status
    assert {c.type for c in status.conditions} == {"Ready", "Stalled"}


def test_applying_the_same_again_changes_nothing(kube: Kube) -> None:
    """From the second time on: the first one after creation also stores the status' defaults."""
    metadata = [kube.apply(policy(SPEC))[0]["metadata"] for _ in range(3)]
    assert metadata[1]["resourceVersion"] == metadata[2]["resourceVersion"]
    assert [m["generation"] for m in metadata] == [1, 1, 1]


def test_a_revision_in_a_node_obeys_the_same_rules(kube: Kube) -> None:
    node = {
        "apiVersion": "kvtier.io/v1alpha1",
        "kind": "KVTierNode",
        "metadata": {"name": "node-a"},
        "spec": {
            "policy": {"name": "llama", "uid": "u", "generation": 1},
            "stable": {
                "revision": HASH,
                "spec": {"valueDensity": {"model": "classic"}, "durability": "sync"},
            },
        },
    }
    with pytest.raises(ApiError, match="durability: sync needs an NVMe tier"):
        kube.apply(node)
    node["spec"]["stable"]["spec"]["durability"] = "none"  # type: ignore[index]
    (stored,) = kube.apply(node)
    read = KVTierNode.read(stored)
    assert read.spec.stable is not None
    assert read.spec.stable.spec.durability == "none"
    assert read.spec.report_interval_seconds == 10
    del node["spec"]["policy"]  # type: ignore[attr-defined]
    with pytest.raises(ApiError, match="a revision comes from a policy"):
        kube.apply(node)
