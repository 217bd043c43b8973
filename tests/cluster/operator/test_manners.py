"""How the operator behaves towards the API server and towards users' objects."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from controlplane.launcher import ControlPlaneError
from controlplane.testing import Kube

USER = "system:serviceaccount:kvtier-system:kvtier-operator"


@pytest.mark.parametrize("seconds", [6, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.timeout(150)
def test_steady_state_is_silent(
    kube: Kube,
    operator: Any,
    agents: Any,
    add_nodes: Any,
    apply_policy: Any,
    ready_reason: Any,
    writes: Any,
    seconds: int,
) -> None:
    add_nodes("a", "b", "c", gpu="x")
    process = operator()
    whole = writes()
    apply_policy("chat", gpu="x")
    apply_policy("nobody", gpu="none")
    kube.eventually(lambda: ready_reason("chat") == ("True", "InForce"), what="in force")
    time.sleep(2)
    since = writes()
    end = time.monotonic() + seconds
    while time.monotonic() < end:  # agents go on reporting counters
        for name in "abc":
            status = kube.get("kvtiernodes", name)["status"]
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            kube.apply_status(
                {
                    "apiVersion": "kvtier.io/v1alpha1",
                    "kind": "KVTierNode",
                    "metadata": {"name": name},
                    "status": {**status, "lastReportTime": now},
                }
            )
        time.sleep(1)
    assert since() == []
    # From the first write to the last: never a policy's spec, and no mark on what users own.
    assert {what for _, what in whole()} <= {
        "kvtierpolicies/status",
        "kvtiernodes",
        "controllerrevisions",
        "events",
    }
    for kind in ("kvtierpolicies", "nodes"):
        for raw in kube.list(kind):
            assert "finalizers" not in raw["metadata"]
            assert "annotations" not in raw["metadata"]
    assert kube.get("kvtiernodes", "a")["metadata"].get("finalizers") is None
    before = writes()
    process.kill()
    process.start()
    kube.eventually(lambda: process.said("synced"), what="synced again", timeout=60)
    time.sleep(2)
    assert before() == []


def test_the_hatch_for_the_person_on_call(
    kube: Kube, operator: Any, add_nodes: Any, apply_policy: Any, writes: Any
) -> None:
    add_nodes("a", gpu="x")
    operator()
    apply_policy("chat", gpu="x")
    kube.eventually(lambda: kube.find("kvtiernodes", "a"), what="told")
    time.sleep(1)
    kube.kubectl("annotate", "ktp", "chat", "kvtier.io/reconcile=paused")

    def says_so() -> bool:
        conditions = kube.get("kvtierpolicies", "chat")["status"]["conditions"]
        return any(c["reason"] == "ReconcilePaused" for c in conditions)

    kube.eventually(says_so, what="says so")
    since = writes()
    apply_policy("chat", gpu="x", page={"tokens": 512})
    add_nodes("b", gpu="x")
    time.sleep(2)
    assert since() == []
    assert kube.find("kvtiernodes", "b") is None
    kube.kubectl("annotate", "ktp", "chat", "kvtier.io/reconcile-")
    kube.eventually(lambda: kube.find("kvtiernodes", "b"), what="goes on")


def test_it_has_no_right_to_write_a_spec(kube: Kube, operator: Any, apply_policy: Any) -> None:
    operator()
    apply_policy("chat")
    as_operator = kube.plane.user_kubeconfig(USER)
    with pytest.raises(ControlPlaneError, match="forbidden"):
        kube.kubectl(
            *("patch", "ktp", "chat", "--type=merge", "-p", '{"spec": {"priority": 7}}'),
            kubeconfig=as_operator,
        )


def test_probes_and_metrics(kube: Kube, operator: Any, add_nodes: Any, apply_policy: Any) -> None:
    add_nodes("a", gpu="x")
    process = operator()
    apply_policy("chat", gpu="x")
    kube.eventually(lambda: kube.find("kvtiernodes", "a"), what="told")
    code, body = process.probe("/readyz")
    assert code == 200
    ages = json.loads(body)["secondsSinceWatchWasHeard"]
    assert set(ages) == {"kvtierpolicies", "kvtiernodes", "nodes"}
    assert all(age is not None and age < 60 for age in ages.values())
    assert process.probe("/healthz")[0] == 200
    code, text = process.probe("/metrics")
    assert 'kvtier_operator_writes_total{outcome="ok",resource="kvtiernodes",verb="patch"}' in text
    assert 'kvtier_operator_objects{kind="kvtiernodes"} 1.0' in text
    assert process.terminate() == 0


def test_it_waits_for_the_crds_and_says_so(kube: Kube, operator: Any, apply_policy: Any) -> None:
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/kvtiernodes.kvtier.io"
    crd = kube.api.get(path)
    kube.api.request("DELETE", path)
    process = operator(wait=False, fresh=True)

    def says() -> bool:
        lines = [line for line in process.lines() if line["event"] == "waiting"]
        return any("CRDs are missing: kvtiernodes" in line["obstacle"] for line in lines)

    kube.eventually(says, what="says what is missing", timeout=60)
    assert process.probe("/healthz")[0] == 200
    assert process.probe("/readyz")[0] == 503
    meta = {"name": crd["metadata"]["name"]}
    kube.define([{**crd, "metadata": meta, "status": None}])
    kube.eventually(lambda: process.said("synced"), what="starts", timeout=60)
    kube.eventually(lambda: process.probe("/readyz")[0] == 200, what="ready")


def test_another_crd_version_makes_no_new_revision(
    kube: Kube, operator: Any, agents: Any, add_nodes: Any, apply_policy: Any, ready_reason: Any
) -> None:
    """A policy written against an older operator: every default spelled out in its revision."""
    add_nodes("a")
    process = operator(fresh=True)
    apply_policy("chat")
    kube.eventually(lambda: ready_reason("chat") == ("True", "InForce"), what="in force")
    before = [r["metadata"]["uid"] for r in kube.list("controllerrevisions", "kvtier-system")]
    process.kill()
    apply_policy("chat", page={"tokens": 256}, pressure={"tightenPercent": 90}, durability="async")
    process.start()
    kube.eventually(lambda: process.said("synced"), what="synced", timeout=60)
    kube.eventually(lambda: ready_reason("chat") == ("True", "InForce"), what="still in force")
    after = [r["metadata"]["uid"] for r in kube.list("controllerrevisions", "kvtier-system")]
    assert after == before
