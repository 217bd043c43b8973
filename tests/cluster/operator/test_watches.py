"""What happens when a watch cannot go on: the process ends or says why it waits, never neither."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from controlplane.testing import Kube

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/"
NAMESPACE = "kvtier-system"


def complaints(process: Any) -> list[dict[str, Any]]:
    return [line for line in process.lines() if line.get("level") in ("warning", "error")]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("plural", ["kvtierpolicies", "kvtiernodes"])
def test_a_crd_that_goes_ends_the_process_and_one_that_comes_back_is_served(
    kube: Kube, operator: Any, agents: Any, add_nodes: Any, apply_policy: Any, plural: str
) -> None:
    add_nodes("a", "b", gpu="x")
    process = operator(fresh=True)
    apply_policy("chat", gpu="x")
    kube.eventually(lambda: kube.find("kvtiernodes", "a"), what="told")
    crd = kube.api.get(f"{CRDS}{plural}.kvtier.io")
    kube.api.request("DELETE", f"{CRDS}{plural}.kvtier.io")
    assert process.process.wait(60) == 1
    ends = [line for line in complaints(process) if "restarting it is safe" in line["event"]]
    assert len(ends) == 1
    assert f"HTTP 404 to watch {plural}" in ends[0]["reason"]
    assert not any("exception" in line for line in process.lines())
    process.process = None
    process.start()  # as the kubelet does

    def says() -> bool:
        return any(f"missing: {plural}" in str(line.get("obstacle")) for line in process.lines())

    kube.eventually(says, what="says what is missing", timeout=60)
    assert process.probe("/healthz")[0] == 200
    kube.define([{**crd, "metadata": {"name": crd["metadata"]["name"]}, "status": None}])
    apply_policy("chat", gpu="x", page={"tokens": 512})

    def served() -> bool:
        spec = kube.get("kvtiernodes", "b")["spec"]
        return bool(spec.get("stable") and spec["stable"]["spec"]["page"]["tokens"] == 512)

    kube.eventually(served, what="the new policy is in force", timeout=60)
    assert process.terminate() == 0


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("resource", "verb"),
    [
        ("nodes", "watch"),
        pytest.param("kvtierpolicies", "watch", marks=pytest.mark.slow),
        pytest.param("nodes", "list", marks=pytest.mark.slow),
    ],
)
def test_a_missing_right_is_named_once_and_waited_for(
    kube: Kube,
    operator: Any,
    take_right: Any,
    add_nodes: Any,
    apply_policy: Any,
    resource: str,
    verb: str,
) -> None:
    add_nodes("a", gpu="x")
    apply_policy("chat", gpu="x")
    give_back = take_right(verb, resource)
    process = operator(wait=False, fresh=True)

    def lines() -> list[str]:
        return [str(line.get("obstacle")) for line in complaints(process)]

    named = f"the right to {verb} {resource} is missing"
    kube.eventually(lambda: any(named in line for line in lines()), what="named", timeout=60)
    kube.eventually(lambda: process.probe("/readyz")[0] == 503, what="not ready")
    assert named in json.loads(process.probe("/readyz")[1])["watchesRefused"][0]
    assert process.probe("/healthz")[0] == 200
    time.sleep(5)  # some more attempts
    assert sum(named in line for line in lines()) == 1
    assert not any(str(line["logger"]).startswith("kopf") for line in complaints(process))
    give_back()
    kube.eventually(lambda: process.probe("/readyz")[0] == 200, what="ready", timeout=60)
    kube.eventually(lambda: kube.find("kvtiernodes", "a"), what="told", timeout=60)
    assert process.terminate() == 0


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_dead_token_is_named_once_and_makes_the_operator_unready(
    kube: Kube, operator: Any, add_nodes: Any
) -> None:
    add_nodes("a", gpu="x")
    account = {"name": "kvtier-operator", "namespace": NAMESPACE}
    kube.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account})
    token = kube.kubectl("create", "token", "kvtier-operator", "-n", NAMESPACE).stdout.strip()
    credentials = kube.plane.token_kubeconfig(token)
    process = operator("--watch-timeout-seconds", "30", credentials=credentials)
    kube.eventually(lambda: process.probe("/readyz")[0] == 200, what="ready")
    kube.delete("serviceaccounts", "kvtier-operator", NAMESPACE)
    # The API server goes on with an open watch; the next one needs the token.
    kube.eventually(lambda: process.probe("/readyz")[0] == 503, what="not ready", timeout=90)
    time.sleep(5)  # some more attempts
    said = complaints(process)
    assert len(said) == 1, said
    assert "refuses the operator's token" in said[0]["obstacle"]
    assert process.terminate() == 0
