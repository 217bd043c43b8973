"""A policy on its way to the nodes, through the real operator and the real API server."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
from controlplane.api import ApiError
from controlplane.testing import Kube

NAMESPACE = "kvtier-system"


def told(kube: Kube) -> dict[str, tuple[str, int]]:
    """Node -> (policy, page tokens) of what its KVTierNode says."""
    out = {}
    for raw in kube.list("kvtiernodes"):
        spec = raw["spec"]
        stable = spec.get("stable", {}).get("spec", {})
        out[raw["metadata"]["name"]] = (
            spec.get("policy", {}).get("name", ""),
            stable.get("page", {}).get("tokens", 0),
        )
    return out


def test_apply_edit_and_delete(
    kube: Kube,
    operator: Any,
    agents: Any,
    add_nodes: Any,
    apply_policy: Any,
    ready_reason: Any,
    capsys: Any,
) -> None:
    add_nodes("a", "b", "c", gpu="x")
    add_nodes("other", gpu="y")
    operator()
    started = time.monotonic()
    apply_policy("chat", gpu="x")
    kube.eventually(lambda: told(kube) == dict.fromkeys("abc", ("chat", 256)), what="specs")
    with capsys.disabled():
        print(f"\n[apply to KVTierNode.spec, 3 nodes: {time.monotonic() - started:.3f} s]")
    kube.eventually(lambda: ready_reason("chat") == ("True", "InForce"), what="in force")
    status = kube.get("kvtierpolicies", "chat")["status"]
    assert status["activeRevision"] == status["desiredRevision"]
    assert {k: status["nodes"][k] for k in ("selected", "ready", "updated", "stale")} == {
        "selected": 3,
        "ready": 3,
        "updated": 3,
        "stale": 0,
    }

    apply_policy("chat", gpu="x", page={"tokens": 512})
    kube.eventually(lambda: told(kube) == dict.fromkeys("abc", ("chat", 512)), what="edit")
    kube.eventually(lambda: ready_reason("chat") == ("True", "InForce"), what="edit in force")
    (first, second) = sorted(kube.list("controllerrevisions", NAMESPACE), key=_number)
    assert first["data"]["page"]["tokens"] == 256
    assert second["data"]["page"]["tokens"] == 512
    active = kube.get("kvtierpolicies", "chat")["status"]["activeRevision"]
    assert second["metadata"]["name"] == f"chat-{active[:10]}"

    kube.delete("kvtierpolicies", "chat")
    kube.eventually(lambda: told(kube) == dict.fromkeys("abc", ("", 0)), what="orphaned")
    assert all(raw["spec"]["orphanedAt"] for raw in kube.list("kvtiernodes"))


def _number(raw: dict[str, Any]) -> int:
    return int(raw["revision"])


def test_a_revert_is_current_at_once_and_makes_no_revision(
    kube: Kube, operator: Any, add_nodes: Any, apply_policy: Any
) -> None:
    add_nodes("a")
    operator()
    for tokens in (256, 512, 256):
        apply_policy("chat", page={"tokens": tokens})
        kube.eventually(lambda t=tokens: told(kube) == {"a": ("chat", t)}, what=str(tokens))
    assert len(kube.list("controllerrevisions", NAMESPACE)) == 2


def test_precedence_and_who_superseded_whom(
    kube: Kube, operator: Any, add_nodes: Any, apply_policy: Any, ready_reason: Any
) -> None:
    add_nodes("a", "b", gpu="x")
    operator()
    apply_policy("everywhere")
    kube.eventually(lambda: told(kube) == dict.fromkeys("ab", ("everywhere", 256)), what="first")
    apply_policy("special", gpu="x", priority=10, page={"tokens": 1024})
    kube.eventually(lambda: told(kube) == dict.fromkeys("ab", ("special", 1024)), what="taken")
    kube.eventually(lambda: ready_reason("everywhere") == ("True", "Superseded"), what="said")
    assert kube.get("kvtierpolicies", "everywhere")["status"]["supersededBy"] == [
        {"node": "a", "policy": "special"},
        {"node": "b", "policy": "special"},
    ]
    apply_policy("everywhere", priority=20)
    kube.eventually(lambda: told(kube) == dict.fromkeys("ab", ("everywhere", 256)), what="back")


def test_nodes_leave_and_return(
    kube: Kube, operator: Any, agents: Any, add_nodes: Any, apply_policy: Any, ready_reason: Any
) -> None:
    add_nodes("a", "b", gpu="x")
    operator()
    apply_policy("chat", gpu="x")
    kube.eventually(lambda: ready_reason("chat") == ("True", "InForce"), what="in force")
    kube.delete("nodes", "b")
    kube.eventually(lambda: set(told(kube)) == {"a"}, what="gone")
    add_nodes("b", gpu="x")
    kube.eventually(lambda: told(kube) == dict.fromkeys("ab", ("chat", 256)), what="returned")
    uid = kube.get("nodes", "b")["metadata"]["uid"]
    assert kube.get("kvtiernodes", "b")["spec"]["nodeUID"] == uid
    kube.eventually(lambda: ready_reason("chat") == ("True", "InForce"), what="in force again")


def test_a_node_that_is_let_go_is_retired_after_the_grace_period(
    kube: Kube, operator: Any, add_nodes: Any, apply_policy: Any, writes: Any
) -> None:
    add_nodes("a", gpu="x")
    operator("--orphan-grace-seconds", "3")
    apply_policy("chat", gpu="x")
    kube.eventually(lambda: told(kube) == {"a": ("chat", 256)}, what="told")
    since = writes()
    add_nodes("a", gpu="y")
    kube.eventually(lambda: told(kube) == {"a": ("", 0)}, what="let go")
    kube.eventually(lambda: told(kube) == {}, what="retired")
    time.sleep(2)
    assert since().count(("delete", "kvtiernodes")) == 1


def test_agents_that_cannot_apply_stall_the_policy(
    kube: Kube, operator: Any, agents: Any, add_nodes: Any, apply_policy: Any, ready_reason: Any
) -> None:
    add_nodes("a", "b", gpu="x")
    agents.refusing.add("b")
    operator()
    apply_policy("chat", gpu="x")
    kube.eventually(lambda: ready_reason("chat") == ("False", "NodesCannotApply"), what="says so")
    conditions = kube.get("kvtierpolicies", "chat")["status"]["conditions"]
    stalled = next(c for c in conditions if c["type"] == "Stalled")
    assert stalled["status"] == "True"
    assert "b (VolumeUnknown: volume data9" in stalled["message"]


def test_paused_keeps_nodes_where_they_are(
    kube: Kube, operator: Any, agents: Any, add_nodes: Any, apply_policy: Any, ready_reason: Any
) -> None:
    add_nodes("a", gpu="x")
    operator()
    apply_policy("chat", gpu="x")
    kube.eventually(lambda: ready_reason("chat") == ("True", "InForce"), what="in force")
    apply_policy("chat", gpu="x", page={"tokens": 512}, rollout={"paused": True})
    kube.eventually(lambda: ready_reason("chat") == ("False", "Paused"), what="paused")
    add_nodes("b", gpu="x")
    kube.eventually(lambda: told(kube) == dict.fromkeys("ab", ("chat", 256)), what="stay")
    apply_policy("chat", gpu="x", page={"tokens": 512})
    kube.eventually(lambda: told(kube) == dict.fromkeys("ab", ("chat", 512)), what="goes on")


def test_no_node_selected_is_ready_and_says_what_was_asked_for(
    kube: Kube, operator: Any, apply_policy: Any, ready_reason: Any
) -> None:
    operator()
    apply_policy("chat", gpu="b200")
    kube.eventually(lambda: ready_reason("chat") == ("True", "NoNodesSelected"), what="ready")
    message = kube.get("kvtierpolicies", "chat")["status"]["conditions"][0]["message"]
    assert "gpu=b200" in message
    seen = [e for e in kube.list("events.events.k8s.io") if e["reason"] == "NoNodesSelected"]
    assert len(seen) == 1
    assert seen[0]["regarding"]["name"] == "chat"


def test_an_invalid_spec_that_an_older_crd_let_through_keeps_the_last_good_revision(
    kube: Kube, operator: Any, agents: Any, add_nodes: Any, apply_policy: Any, ready_reason: Any
) -> None:
    crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/kvtierpolicies.kvtier.io"
    add_nodes("a")
    operator(fresh=True)  # the next test gets its CRD back, under nobody's watch
    apply_policy("chat")
    kube.eventually(lambda: ready_reason("chat") == ("True", "InForce"), what="in force")
    crd = copy.deepcopy(kube.api.get(crds))
    page = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"][
        "properties"
    ]["page"]
    page.pop("x-kubernetes-validations")
    kube.api.request("PUT", crds, crd)

    def let_through() -> bool:
        try:
            apply_policy("chat", page={"tokens": 100})
        except ApiError:
            return False
        return True

    kube.eventually(let_through, what="the weaker CRD is in force")
    kube.eventually(lambda: ready_reason("chat") == ("False", "InvalidSpec"), what="stalled")
    add_nodes("b")
    kube.eventually(lambda: told(kube) == dict.fromkeys("ab", ("chat", 256)), what="last good")
    conditions = kube.get("kvtierpolicies", "chat")["status"]["conditions"]
    assert "multiple of 16" in next(c for c in conditions if c["type"] == "Stalled")["message"]


def test_a_policy_made_again_under_its_name_gets_its_own_revision(
    kube: Kube, operator: Any, add_nodes: Any, apply_policy: Any
) -> None:
    add_nodes("a")
    operator()
    apply_policy("chat")
    kube.eventually(lambda: told(kube) == {"a": ("chat", 256)}, what="told")
    kube.delete("kvtierpolicies", "chat")
    uid = apply_policy("chat")["metadata"]["uid"]

    def owned() -> bool:
        found = kube.list("controllerrevisions", NAMESPACE)
        return [r["metadata"]["ownerReferences"][0]["uid"] for r in found] == [uid]

    kube.eventually(owned, what="the revision belongs to the new policy")
    kube.eventually(
        lambda: kube.get("kvtiernodes", "a")["spec"].get("policy", {}).get("uid") == uid,
        what="so does the node",
    )


@pytest.mark.parametrize("count", [pytest.param(500, marks=pytest.mark.slow), 60])
def test_many_nodes(
    kube: Kube,
    operator: Any,
    add_nodes: Any,
    apply_policy: Any,
    capsys: Any,
    count: int,
) -> None:
    add_nodes(*(f"n{i:03}" for i in range(count)), gpu="x")
    operator()
    started = time.monotonic()
    apply_policy("chat", gpu="x")
    wanted = ("chat", 256)
    kube.eventually(
        lambda: list(told(kube).values()) == [wanted] * count, what="created", timeout=60
    )
    created = time.monotonic() - started
    started = time.monotonic()
    apply_policy("chat", gpu="x", page={"tokens": 512})
    wanted = ("chat", 512)
    kube.eventually(
        lambda: list(told(kube).values()) == [wanted] * count, what="edited", timeout=60
    )
    with capsys.disabled():
        print(
            f"\n[apply to KVTierNode.spec, {count} nodes: first {created:.3f} s, "
            f"edit {time.monotonic() - started:.3f} s]"
        )
