"""What both service accounts may do, as the real API server sees it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from controlplane.api import ApiError
from controlplane.testing import eventually

NAMESPACE = "kvtier-system"
RBAC = Path(__file__).parents[3] / "docs" / "administrator" / "rbac.md"
SERVER_TIMEOUT = 30.0

Right = tuple[str, str, str, str]
"""(namespace or "all", API group, resource, verb)"""


def documented(account: str) -> set[Right]:
    """The table in rbac.md, one right per verb."""
    rights: set[Right] = set()
    for line in RBAC.read_text().splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[0] == account:
            _, namespace, group, resource, verbs, _ = cells
            namespace = NAMESPACE if namespace == "the release's" else namespace
            group = "" if group == "core" else group
            for verb in verbs.split(","):
                rights.add((namespace, group, resource, verb.strip()))
    return rights


def rights_in(cluster: Any, account: str, namespace: str) -> set[tuple[str, str, str]]:
    """What `kubectl auth can-i --list` shows, as (group, resource, verb)."""
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": namespace},
    }
    answer = cluster.plane.kubectl(
        *("create", "--as", f"system:serviceaccount:{NAMESPACE}:{account}"),
        *("--as-group", "system:serviceaccounts", "--as-group", "system:authenticated"),
        *("-o", "json", "--validate=false", "-f", "-"),
        input=json.dumps(review),
    )
    status = json.loads(answer.stdout)["status"]
    assert not status["incomplete"]
    found = set()
    for rule in status["resourceRules"]:
        assert not rule.get("resourceNames")
        found |= {
            (group, resource, verb)
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }
    return found


def granted(cluster: Any, account: str) -> set[Right]:
    """The account's rights beyond those of an account without any role."""
    spaces = ("kube-public", "default", NAMESPACE)
    seen = {
        space: rights_in(cluster, account, space) - rights_in(cluster, "nobody", space)
        for space in spaces
    }
    everywhere = set.intersection(*seen.values())
    rights = {("all", *right) for right in everywhere}
    for space, found in seen.items():
        rights |= {(space, *right) for right in found - everywhere}
    return rights


@pytest.mark.parametrize("account", ["kvtier-operator", "kvtier-agent"])
def test_the_documented_table_is_what_the_api_server_grants(installed: Any, account: str) -> None:
    table = documented(account)
    assert table, f"{RBAC.name} has no row for {account}"
    assert granted(installed, account) == table


@pytest.mark.parametrize(
    ("account", "verb", "resource", "namespace", "may"),
    [
        ("kvtier-operator", "patch", "kvtierpolicies.kvtier.io", "default", "no"),
        ("kvtier-operator", "update", "kvtierpolicies.kvtier.io", "default", "no"),
        ("kvtier-operator", "create", "kvtierpolicies.kvtier.io", "default", "no"),
        ("kvtier-operator", "delete", "kvtierpolicies.kvtier.io", "default", "no"),
        ("kvtier-operator", "patch", "kvtierpolicies.kvtier.io/status", "default", "yes"),
        ("kvtier-operator", "patch", "kvtiernodes.kvtier.io", "default", "yes"),
        ("kvtier-operator", "patch", "kvtiernodes.kvtier.io/status", "default", "no"),
        ("kvtier-operator", "create", "controllerrevisions.apps", NAMESPACE, "yes"),
        ("kvtier-operator", "create", "controllerrevisions.apps", "default", "no"),
        ("kvtier-operator", "get", "secrets", NAMESPACE, "no"),
        ("kvtier-agent", "list", "kvtierpolicies.kvtier.io", "default", "no"),
        ("kvtier-agent", "patch", "kvtiernodes.kvtier.io", "default", "no"),
        ("kvtier-agent", "patch", "kvtiernodes.kvtier.io/status", "default", "yes"),
        ("kvtier-agent", "create", "kvtiernodes.kvtier.io", "default", "no"),
        ("kvtier-agent", "get", "secrets", NAMESPACE, "no"),
        ("kvtier-agent", "list", "nodes", "default", "no"),
    ],
)
def test_can_i(
    installed: Any, account: str, verb: str, resource: str, namespace: str, may: str
) -> None:
    resource, _, subresource = resource.partition("/")
    answer = installed.plane.kubectl(
        *("auth", "can-i", verb, resource, "--namespace", namespace),
        *(("--subresource", subresource) if subresource else ()),
        *("--as", f"system:serviceaccount:{NAMESPACE}:{account}"),
        check=False,
    )
    assert answer.stdout.split()[-1] == may


# -- the operator and a policy's spec ------------------------------------------------------------

POLICY = {
    "apiVersion": "kvtier.io/v1alpha1",
    "kind": "KVTierPolicy",
    "metadata": {"name": "chat"},
    "spec": {
        "nodeSelector": {"matchLabels": {"pool": "chat"}},
        "tiers": {"hbm": {"size": "1Gi"}, "dram": {"size": "4Gi"}},
        "valueDensity": {"model": "classic"},
    },
}


@pytest.fixture
def policy(installed: Any) -> Iterator[dict[str, Any]]:
    (made,) = installed.kube.apply(POLICY)
    yield made
    installed.plane.kubectl("delete", "ktp", "chat")


def test_the_operator_cannot_write_a_policys_spec(installed: Any, policy: dict[str, Any]) -> None:
    token = installed.plane.kubectl(
        "create", "token", "kvtier-operator", "--namespace", NAMESPACE
    ).stdout.strip()
    api = installed.plane.api(installed.plane.token_kubeconfig(token))
    path = "/apis/kvtier.io/v1alpha1/kvtierpolicies/chat"
    with pytest.raises(ApiError, match='cannot patch resource "kvtierpolicies"'):
        api.apply(path, {**POLICY, "spec": {**POLICY["spec"], "priority": 7}})
    api.apply(
        f"{path}/status",
        {**POLICY, "spec": {**POLICY["spec"], "priority": 7}, "status": {"observedGeneration": 1}},
        manager="kvtier-operator",
    )
    api.close()
    now = installed.kube.get("ktp", "chat")
    assert now["status"]["observedGeneration"] == 1
    assert now["spec"] == policy["spec"], "a status write changed the spec"


# -- an agent and its node -----------------------------------------------------------------------


def node(name: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}


def cache_node(name: str, uid: str) -> dict[str, Any]:
    return {
        "apiVersion": "kvtier.io/v1alpha1",
        "kind": "KVTierNode",
        "metadata": {"name": name},
        "spec": {"nodeUID": uid},
    }


def pod(name: str, on: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "nodeName": on,
            "serviceAccountName": "kvtier-agent",
            "containers": [{"name": "agent", "image": "kvtier/agent:test"}],
        },
    }


@pytest.fixture
def agent(installed: Any) -> Iterator[Callable[..., Any]]:
    """Acts with the token of the agent on node-a: agent(verb, object name, body, subresource)."""
    nodes = installed.kube.apply(node("node-a"), node("node-b"))
    for made in nodes:
        installed.kube.apply(cache_node(made["metadata"]["name"], made["metadata"]["uid"]))
    installed.kube.apply(pod("agent-a", "node-a"))
    token = installed.plane.kubectl(
        *("create", "token", "kvtier-agent", "--namespace", NAMESPACE),
        *("--bound-object-kind", "Pod", "--bound-object-name", "agent-a"),
    ).stdout.strip()
    yield as_bearer(installed, token)
    installed.plane.kubectl(
        "delete", "pod", "agent-a", "--namespace", NAMESPACE, "--force", "--grace-period=0"
    )
    installed.plane.kubectl("delete", "ktn,node", "node-a", "node-b")


def refused(act: Callable[[], str], said: str) -> None:
    """The API server says so; it takes a moment to act on a new admission policy or role."""

    def does() -> bool:
        answer = act()
        assert said in answer, answer
        return True

    eventually(does, what=f"the refusal {said!r}", timeout=SERVER_TIMEOUT)


def as_bearer(cluster: Any, token: str) -> Callable[..., str]:
    """act(name, body, subresource) -> "" if it was allowed, else what the API server said."""
    api = cluster.plane.api(cluster.plane.token_kubeconfig(token))

    def act(name: str, body: dict[str, Any], subresource: str = "status") -> str:
        path = f"/apis/kvtier.io/v1alpha1/kvtiernodes/{name}"
        if subresource:
            path += f"/{subresource}"
        item = {
            "apiVersion": "kvtier.io/v1alpha1",
            "kind": "KVTierNode",
            "metadata": {"name": name},
            **body,
        }
        try:
            api.apply(path, item, manager="kvtier-agent")
        except ApiError as error:
            return str(error)
        return ""

    return act


STATUS = {"status": {"observedGeneration": 1, "agentVersion": "0.1.0"}}


def test_an_agent_reports_for_its_own_node(installed: Any, agent: Callable[..., str]) -> None:
    assert agent("node-a", STATUS) == ""
    assert installed.kube.get("ktn", "node-a")["status"]["agentVersion"] == "0.1.0"


def test_an_agent_is_refused_on_another_node(installed: Any, agent: Callable[..., str]) -> None:
    said = "an agent on node node-a may update the status of KVTierNode node-a only, not of node-b"
    refused(lambda: agent("node-b", STATUS), said)
    assert agent("node-a", STATUS) == ""


def test_the_documented_check_works_from_an_administrators_kubeconfig(
    installed: Any, agent: Callable[..., str], tmp_path: Path
) -> None:
    """The commands of rbac.md under "Check it", as they stand there."""
    if shutil.which("jq") is None:
        pytest.skip("no jq on this machine; the documented commands use it")
    text = RBAC.read_text()
    block = text[text.index("Check it:") :].split("```")[1]
    lines = [x for x in block.splitlines() if x and x != "console" and not x.startswith("...")]
    script = "\n".join(line.removeprefix("$ ") for line in lines)
    assert "POD-ON-NODE-A" in script
    script = script.replace("POD-ON-NODE-A", "agent-a")
    said = "an agent on node node-a may update the status of KVTierNode node-a only, not of node-b"
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.parent.mkdir()
    kubectl.symlink_to(installed.plane.kubectl_file)
    # It holds a client certificate, as an administrator's often does.
    environment = {
        "PATH": f"{kubectl.parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "KUBECONFIG": str(installed.plane.kubeconfig),
    }

    def run(node: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", script.replace("name: node-b", f"name: {node}")],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    refused(lambda: run("node-b").stderr, said)
    allowed = run("node-a")
    assert allowed.stderr == ""
    assert "kvtiernode.kvtier.io/node-a serverside-applied" in allowed.stdout
    assert list(tmp_path.glob("token")) == []


def test_an_agent_is_refused_on_the_spec(installed: Any, agent: Callable[..., str]) -> None:
    before = installed.kube.get("ktn", "node-a")["spec"]
    refusal = agent("node-a", {"spec": {"reportIntervalSeconds": 3000}}, subresource="")
    assert "cannot patch resource" in refusal
    # Spec fields in a status write are dropped.
    assert agent("node-a", {**STATUS, "spec": {"reportIntervalSeconds": 3000}}) == ""
    assert installed.kube.get("ktn", "node-a")["spec"] == before


def test_a_role_that_is_too_wide_still_opens_no_spec(
    installed: Any, agent: Callable[..., str]
) -> None:
    name = "too-wide"
    installed.plane.kubectl(
        *("create", "clusterrole", name, "--verb=create,patch,update,delete"),
        "--resource=kvtiernodes.kvtier.io",
    )
    installed.plane.kubectl(
        *("create", "clusterrolebinding", name, f"--clusterrole={name}"),
        f"--serviceaccount={NAMESPACE}:kvtier-agent",
    )
    try:
        said = "an agent may update the status of a KVTierNode and nothing else"
        body = {"spec": {"reportIntervalSeconds": 3000}}
        refused(lambda: agent("node-a", body, subresource=""), said)
    finally:
        installed.plane.kubectl("delete", "clusterrole,clusterrolebinding", name)


def test_a_token_without_a_node_reports_for_none(installed: Any, agent: Callable[..., str]) -> None:
    token = installed.plane.kubectl(
        "create", "token", "kvtier-agent", "--namespace", NAMESPACE
    ).stdout.strip()
    act = as_bearer(installed, token)
    refused(lambda: act("node-a", STATUS), "this token names no node")
