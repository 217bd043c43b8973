"""SIGKILL at any moment, and an API server that goes away: where it ends is the same.

All state is in the cluster, so a run that is killed again and again while users edit policies and
nodes come and go must end where an undisturbed one ends. Both runs finish with the same last acts;
what is compared is every KVTierNode's spec, every policy's status and the revisions in use, without
uids, versions and times. (Which intermediate revisions history holds depends on which edits were
seen at all; an operator that was dead during one never will.)
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
from controlplane.api import ApiError
from controlplane.testing import Kube

NAMESPACE = "kvtier-system"
NODES = [f"n{i}" for i in range(6)]


def put_node(kube: Kube, name: str, gpu: str) -> None:
    kube.apply(
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"gpu": gpu}}}
    )


def put_policy(kube: Kube, name: str, gpu: str, **spec: Any) -> None:
    kube.apply(
        {
            "apiVersion": "kvtier.io/v1alpha1",
            "kind": "KVTierPolicy",
            "metadata": {"name": name},
            "spec": {
                "nodeSelector": {"matchLabels": {"gpu": gpu}},
                "valueDensity": {"model": "classic"},
                **spec,
            },
        }
    )


def opening(kube: Kube) -> None:
    """A state that is reached before anything goes wrong."""
    for name in NODES:
        put_node(kube, name, "x")
    put_node(kube, "leaver", "x")
    put_policy(kube, "base", "x")
    kube.eventually(lambda: settled(kube), what="the opening has settled", timeout=60)


def act(kube: Kube, chance: random.Random) -> None:
    """Something that users and clouds do."""
    name = chance.choice(NODES)
    what = chance.choice(
        ["edit", "edit", "priority", "rival", "no-rival", "node", "no-node", "label"]
    )
    if what == "edit":
        put_policy(kube, "base", "x", page={"tokens": chance.choice([256, 512, 1024])})
    elif what == "priority":
        put_policy(kube, "base", "x", priority=chance.randint(0, 9))
    elif what == "rival":
        put_policy(kube, "rival", "x", priority=5, page={"tokens": chance.choice([128, 2048])})
    elif what == "no-rival":
        kube.delete("kvtierpolicies", "rival")
    elif what == "no-node":
        kube.delete("nodes", name)
    else:
        put_node(kube, name, "x" if what == "node" else chance.choice("xy"))


def closing(kube: Kube) -> None:
    """The last acts, the same in every run. ``leaver`` has been selected ever since."""
    for i, name in enumerate(NODES):
        put_node(kube, name, "x" if i < 4 else "z")
    kube.delete("kvtierpolicies", "rival")
    put_policy(kube, "base", "x", priority=1, page={"tokens": 512})
    put_policy(kube, "zeds", "z", page={"tokens": 64})
    put_policy(kube, "none", "nowhere")
    put_node(kube, "leaver", "unselected")


def settled(kube: Kube) -> bool:
    """Every policy is about its present generation and Ready."""
    policies = kube.list("kvtierpolicies")
    for raw in policies:
        status = raw.get("status", {})
        if status.get("observedGeneration") != raw["metadata"]["generation"]:
            return False
        if not any(
            c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", ())
        ):
            return False
    return bool(policies)


def end_state(kube: Kube) -> dict[str, Any]:
    out: dict[str, Any] = {}
    uids = {raw["metadata"]["uid"]: raw["metadata"]["name"] for raw in kube.list("kvtierpolicies")}
    for raw in kube.list("kvtiernodes"):
        name, spec = raw["metadata"]["name"], raw["spec"]
        assert spec["nodeUID"] == kube.get("nodes", name)["metadata"]["uid"]
        policy = spec.get("policy")
        if policy is not None:
            # The uid is the right one, and the generation is the present one.
            present = kube.get("kvtierpolicies", policy["name"])["metadata"]
            assert (policy["uid"], policy["generation"]) == (
                present["uid"],
                present["generation"],
            )
        out[f"node {name}"] = {
            "policy": policy and policy["name"],
            "stable": spec.get("stable"),
            "interval": spec["reportIntervalSeconds"],
            "orphaned": "orphanedAt" in spec,
            "finalizers": raw["metadata"].get("finalizers"),
        }
    in_use = set()
    for raw in kube.list("kvtierpolicies"):
        status = raw["status"]
        for condition in status["conditions"]:
            del condition["lastTransitionTime"]
            del condition["observedGeneration"]
        del status["observedGeneration"]
        out[f"policy {raw['metadata']['name']}"] = status
        in_use.add(f"{raw['metadata']['name']}-{status['desiredRevision'][:10]}")
    stored = {raw["metadata"]["name"]: raw for raw in kube.list("controllerrevisions", NAMESPACE)}
    for name in sorted(in_use):
        owner = stored[name]["metadata"]["ownerReferences"][0]
        assert uids[owner["uid"]] == owner["name"]
        out[f"revision {name}"] = stored[name]["data"]
    return out


def final_state(kube: Kube) -> dict[str, Any]:
    """After the last acts have settled, and nothing moves any more."""
    kube.eventually(lambda: settled(kube), what="all policies are Ready", timeout=90)

    def orphaned() -> bool:
        return "policy" not in kube.get("kvtiernodes", "leaver")["spec"]

    kube.eventually(orphaned, what="the leaver is let go", timeout=30)
    found = end_state(kube)
    time.sleep(1.5)
    assert end_state(kube) == found
    return found


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
def test_kills_do_not_change_where_it_ends(
    new_cluster: Any, new_operator: Any, new_agents: Any, kills: int
) -> None:
    chance = random.Random(kills)

    calm = new_cluster("calm")
    agents, process = new_agents(calm), new_operator(calm)
    opening(calm)
    for _ in range(20):
        act(calm, chance)
    closing(calm)
    wanted = final_state(calm)
    agents.stop()
    process.kill()
    calm.plane.stop()

    rough = new_cluster("rough")
    new_agents(rough)
    process = new_operator(rough)
    opening(rough)
    over = threading.Event()
    failures: list[BaseException] = []

    def users() -> None:
        theirs, own = random.Random(kills + 1), Kube(rough.plane)
        while not over.wait(theirs.uniform(0.0, 0.15)):
            try:
                act(own, theirs)
            except BaseException as e:  # shown by the test below
                failures.append(e)
                return

    acting = threading.Thread(target=users, daemon=True)
    acting.start()
    for i in range(kills):
        if i % 2:  # in the middle of work, with what it has just listed
            rough.eventually(lambda: process.said("synced"), what="synced", timeout=60)
            time.sleep(chance.uniform(0.0, 0.5))
        else:  # anywhere, its start included
            time.sleep(chance.uniform(0.0, 4.0))
        process.kill()
        if i == kills - 1:
            over.set()
            acting.join(30)
            closing(rough)  # nobody is there to see the last acts happen
        process.start()
    assert failures == []
    assert final_state(rough) == wanted


@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.timeout(400)
def test_an_outage_of_the_api_server_is_caught_up_with(
    new_cluster: Any, new_operator: Any, new_agents: Any, seconds: int
) -> None:
    kube = new_cluster("outage")
    new_agents(kube)
    process = new_operator(kube)
    opening(kube)
    seen_stale: list[str] = []
    watching = threading.Event()

    def watch() -> None:
        own = Kube(kube.plane)
        while not watching.wait(0.2):
            try:
                status = own.get("kvtierpolicies", "base")["status"]
            except (ApiError, OSError):
                continue
            if status["nodes"]["stale"]:
                seen_stale.append(str(status["nodes"]))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    put_policy(kube, "base", "x", page={"tokens": 1024})
    kube.plane.stop_apiserver(kill=True)
    time.sleep(seconds)
    assert process.process is not None
    assert process.process.poll() is None
    assert process.probe("/healthz")[0] == 200
    kube.plane.start_apiserver()
    # Before the operator is back: a node that goes now is in no event it will have asked for.
    kube.delete("nodes", "n0")
    put_policy(kube, "base", "x", page={"tokens": 2048})
    started = time.monotonic()

    def caught_up() -> bool:
        specs = {raw["metadata"]["name"]: raw["spec"] for raw in kube.list("kvtiernodes")}
        told = {
            s.get("stable", {}).get("spec", {}).get("page", {}).get("tokens")
            for s in specs.values()
        }
        return set(specs) == {*NODES[1:], "leaver"} and told == {2048}

    kube.eventually(caught_up, what="caught up", timeout=60)
    print(
        f"\n[caught up {time.monotonic() - started:.1f} s after {seconds} s without an API server]"
    )
    kube.eventually(lambda: settled(kube), what="Ready again", timeout=30)
    kube.eventually(lambda: process.probe("/readyz")[0] == 200, what="ready", timeout=30)
    watching.set()
    watcher.join(10)
    assert seen_stale == []
