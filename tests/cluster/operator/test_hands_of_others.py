"""Objects that the operator writes, changed by somebody else through the real API server."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
from controlplane.api import ApiError
from controlplane.testing import Kube

ADDITIONS: dict[str, dict[str, Any]] = {
    "a field that is otherwise absent": {"orphanedAt": "2020-01-01T00:00:00Z"},
    "an entry of a list that is merged": {
        "stable": {"spec": {"frozenPrefixes": [{"name": "mine", "maxSize": "1Gi"}]}}
    },
    "a field deep in the revision": {"stable": {"spec": {"slo": {"ttftP99Milliseconds": 77}}}},
}


@pytest.mark.parametrize("addition", ADDITIONS.values(), ids=ADDITIONS)
def test_what_somebody_added_to_a_node_object_is_taken_out_again(
    kube: Kube,
    operator: Any,
    agents: Any,
    add_nodes: Any,
    apply_policy: Any,
    ready_reason: Any,
    writes: Any,
    addition: dict[str, Any],
) -> None:
    add_nodes("a", gpu="x")
    operator()
    apply_policy("chat", gpu="x")
    kube.eventually(lambda: ready_reason("chat") == ("True", "InForce"), what="in force")
    before = copy.deepcopy(kube.get("kvtiernodes", "a")["spec"])
    path = kube.resources.path("kvtier.io/v1alpha1", "KVTierNode", "a")
    merge = "application/merge-patch+json"
    kube.api.request(
        "PATCH", f"{path}?fieldManager=somebody", {"spec": addition}, content_type=merge
    )

    def repaired() -> bool:
        return bool(kube.get("kvtiernodes", "a")["spec"] == before)

    kube.eventually(repaired, what="repaired")
    since = writes()
    time.sleep(2)
    assert since() == []
    # The fields that were somebody's go with the policy as if nothing had been.
    kube.delete("kvtierpolicies", "chat")
    kube.eventually(lambda: "stable" not in kube.get("kvtiernodes", "a")["spec"], what="let go")


def test_a_condition_of_another_controller_stays(
    kube: Kube,
    operator: Any,
    agents: Any,
    add_nodes: Any,
    apply_policy: Any,
    ready_reason: Any,
    writes: Any,
) -> None:
    add_nodes("a", gpu="x")
    operator()
    apply_policy("chat", gpu="x")
    kube.eventually(lambda: ready_reason("chat") == ("True", "InForce"), what="in force")
    since = writes()
    path = kube.resources.path("kvtier.io/v1alpha1", "KVTierPolicy", "chat")
    # Names as Kubernetes allows them, and as many as there is room for.
    foreign = ["Synced", "k8s-1.36_ok", "argocd.example.com/In.Sync-2"]
    foreign += [f"Other{i}" for i in range(28 - len(foreign))]

    def add(*types: str) -> None:
        patch: Any = [
            {
                "op": "add",
                "path": "/status/conditions/-",
                "value": {
                    "type": type_,
                    "status": "True",
                    "reason": "Synced_to:git,again",
                    "message": "long " * 500,
                    "lastTransitionTime": "2026-11-30T00:00:00Z",
                },
            }
            for type_ in types
        ]
        kube.api.request(
            "PATCH", f"{path}/status", patch, content_type="application/json-patch+json"
        )

    add(*foreign)
    with pytest.raises(ApiError, match="so that there is always room for kvtier's own"):
        add("OneTooMany")
    time.sleep(2)
    assert since() == []
    apply_policy("chat", gpu="x", page={"tokens": 512})

    def in_force_again() -> bool:
        raw = kube.get("kvtierpolicies", "chat")
        return raw["metadata"]["generation"] == 2 and ready_reason("chat") == ("True", "InForce")

    kube.eventually(in_force_again, what="in force again")
    kept = [c["type"] for c in kube.get("kvtierpolicies", "chat")["status"]["conditions"]]
    assert set(foreign) < set(kept)


def test_words_of_agents_in_any_script_do_not_stop_a_status(
    kube: Kube, operator: Any, agents: Any, add_nodes: Any, apply_policy: Any, ready_reason: Any
) -> None:
    """An event's note is bounded in bytes, a condition's message in characters."""
    add_nodes(*"abcde", gpu="x")
    operator()
    agents.message = "卷 é " * 100
    agents.refusing |= set("abcde")
    apply_policy("chat", gpu="x")
    kube.eventually(lambda: ready_reason("chat") == ("False", "NodesCannotApply"), what="said")
