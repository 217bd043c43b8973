"""What the chart makes, and what it refuses to make."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvtier_agent.settings import AgentSettings
from kvtier_operator.settings import OperatorSettings

EVERYTHING = {
    "volumes": [
        {"name": "data0", "hostPath": "/mnt/nvme0/kvtier"},
        {"name": "data1", "hostPath": "/mnt/nvme1/kvtier"},
    ],
    "domains": [{"name": "search", "gid": 23000}, {"name": "chat", "gid": 23001}],
    "serviceMonitor": {"enabled": True},
    "prometheusRule": {"enabled": True},
    "agent": {"settings": {"lease_seconds": 60, "log_level": "debug"}},
    "operator": {"settings": {"revision_history_limit": 20}},
}


def scalars(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from scalars(item, f"{path}.{key}")
    elif isinstance(value, list):
        for item in value:
            yield from scalars(item, f"{path}[]")
    else:
        yield path, value


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", []), *pod["containers"]]


# -- permissions ---------------------------------------------------------------------------------


def test_no_role_has_a_wildcard(render: Callable[..., Any]) -> None:
    roles = [o for o in render(EVERYTHING).objects if o["kind"] in ("Role", "ClusterRole")]
    assert roles
    for role in roles:
        for rule in role["rules"]:
            words = [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
            assert "*" not in words, role["metadata"]["name"]
            assert not any(word.startswith(("*/", "bind", "escalate")) for word in words)


def test_the_operator_may_patch_a_policys_status_and_nothing_else_of_it(
    render: Callable[..., Any],
) -> None:
    (role,) = [
        r for r in render().of_kind("ClusterRole") if r["metadata"]["name"] == "kvtier-operator"
    ]
    verbs = {
        resource: set(rule["verbs"])
        for rule in role["rules"]
        for resource in rule["resources"]
        if resource.startswith("kvtierpolicies")
    }
    assert verbs == {"kvtierpolicies": {"list", "watch"}, "kvtierpolicies/status": {"patch"}}


# -- workloads -----------------------------------------------------------------------------------


def test_the_operator_is_one_unprivileged_replica(render: Callable[..., Any]) -> None:
    deployment = render().one("Deployment")["spec"]
    assert deployment["replicas"] == 1
    assert deployment["strategy"] == {"type": "Recreate"}
    pod = deployment["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 65532
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


@pytest.mark.parametrize("kind", ["Deployment", "DaemonSet"])
def test_requests_equal_limits(render: Callable[..., Any], kind: str) -> None:
    for container in containers(render(EVERYTHING).pods[kind]):
        resources = container["resources"]
        assert resources["requests"] == resources["limits"], container["name"]
        assert set(resources["limits"]) == {"cpu", "memory"}


def test_nothing_asks_the_scheduler_for_a_device(render: Callable[..., Any]) -> None:
    rendered = render(EVERYTHING)
    for pod in rendered.pods.values():
        for container in containers(pod):
            for amounts in container["resources"].values():
                assert set(amounts) <= {"cpu", "memory"}
    agent = rendered.pods["DaemonSet"]
    assert agent["runtimeClassName"] == "nvidia"
    environment = {e["name"]: e.get("value") for e in agent["containers"][0]["env"]}
    assert environment["NVIDIA_VISIBLE_DEVICES"] == "all"


def test_no_pod_shares_a_namespace_of_the_node(render: Callable[..., Any]) -> None:
    for pod in render(EVERYTHING).pods.values():
        assert not {"hostIPC", "hostPID", "hostNetwork"} & set(pod)
        for container in containers(pod):
            assert "privileged" not in container["securityContext"]
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]


@pytest.mark.parametrize("kind", ["Deployment", "DaemonSet"])
def test_every_container_that_stays_has_three_probes(render: Callable[..., Any], kind: str) -> None:
    (container,) = render().pods[kind]["containers"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] == "http"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_volumes_and_domains_reach_the_agent_by_name(render: Callable[..., Any]) -> None:
    pod = render(EVERYTHING).pods["DaemonSet"]
    (agent,) = pod["containers"]
    assert agent["args"] == [
        "agent",
        "--volume=data0=/volumes/data0",
        "--volume=data1=/volumes/data1",
        "--domain=search:23000",
        "--domain=chat:23001",
    ]
    assert pod["securityContext"]["supplementalGroups"] == [23000, 23001]
    mounts = {m["name"]: m["mountPath"] for m in agent["volumeMounts"]}
    volumes = {v["name"]: v for v in pod["volumes"]}
    assert set(mounts) <= set(volumes)
    assert mounts["volume-1"] == "/volumes/data1"
    # Directory, not DirectoryOrCreate: a missing mount must not fill the root filesystem.
    assert volumes["volume-1"]["hostPath"] == {
        "path": "/mnt/nvme1/kvtier",
        "type": "Directory",
    }


def test_a_pods_own_shared_memory_has_the_size_of_its_memory(render: Callable[..., Any]) -> None:
    values = {"agent": {"memory": "64Gi", "sharedMemory": {"hostPath": ""}}}
    pod = render(values).pods["DaemonSet"]
    (volume,) = [v for v in pod["volumes"] if v["name"] == "shared-memory"]
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
    assert pod["containers"][0]["resources"]["limits"]["memory"] == "64Gi"


def test_the_node_name_comes_from_the_scheduler(render: Callable[..., Any]) -> None:
    (agent,) = render().pods["DaemonSet"]["containers"]
    (entry,) = [e for e in agent["env"] if e["name"] == "NODE_NAME"]
    field = {"apiVersion": "v1", "fieldPath": "spec.nodeName"}
    assert entry["valueFrom"] == {"fieldRef": field}


@pytest.mark.parametrize(
    ("kind", "prefix", "settings", "expected"),
    [
        (
            "Deployment",
            "KVTIER_OPERATOR_",
            OperatorSettings,
            {"http_address": ("0.0.0.0", 8080), "revision_history_limit": 20},
        ),
        (
            "DaemonSet",
            "KVTIER_AGENT_",
            AgentSettings,
            {"node_name": "node-a", "l0": "owned", "lease_seconds": 60.0, "log_level": "debug"},
        ),
    ],
)
def test_the_programs_read_the_environment_that_the_chart_gives(
    render: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    prefix: str,
    settings: type,
    expected: dict[str, Any],
) -> None:
    (container,) = render(EVERYTHING).pods[kind]["containers"]
    names = [entry["name"] for entry in container["env"]]
    assert len(names) == len(set(names))
    ours = {name.removeprefix(prefix).lower() for name in names if name.startswith(prefix)}
    assert ours
    assert ours <= set(settings.model_fields)  # type: ignore[attr-defined]
    for entry in container["env"]:
        monkeypatch.setenv(entry["name"], entry.get("value", "node-a"))
    read = settings()
    for name, value in expected.items():
        assert getattr(read, name) == value, name


def test_ports_are_the_ones_the_programs_have_by_default(render: Callable[..., Any]) -> None:
    pods = render().pods
    assert pods["Deployment"]["containers"][0]["ports"][0]["containerPort"] == 8080
    agent_default = AgentSettings(node_name="n").http.port
    assert pods["DaemonSet"]["containers"][0]["ports"][0]["containerPort"] == agent_default
    assert OperatorSettings().http.endswith(":8080")


# -- seccomp -------------------------------------------------------------------------------------


def test_the_seccomp_profile_allows_io_uring_and_no_new_namespace(chart: Path) -> None:
    profile = json.loads((chart / "files/seccomp/agent-v1.json").read_text())
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    free = {
        name
        for rule in profile["syscalls"]
        if rule["action"] == "SCMP_ACT_ALLOW" and not rule.get("args")
        for name in rule["names"]
    }
    assert {"io_uring_setup", "io_uring_enter", "io_uring_register"} <= free
    forbidden = {"clone", "clone3", "unshare", "setns", "mount", "ptrace", "bpf", "init_module"}
    assert not forbidden & free
    (clone,) = [r for r in profile["syscalls"] if r["names"] == ["clone"]]
    namespaces = 0x20000 | 0x2000000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000
    assert clone["args"] == [
        {"index": 0, "value": namespaces, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}
    ]


def test_the_profile_is_put_where_the_kubelet_looks(
    render: Callable[..., Any], chart: Path
) -> None:
    rendered = render()
    pod = rendered.pods["DaemonSet"]
    (init,) = pod["initContainers"]
    profile = pod["containers"][0]["securityContext"]["seccompProfile"]
    assert profile["type"] == "Localhost"
    assert init["env"] == [
        {"name": "TARGET", "value": f"/kubelet-seccomp/{profile['localhostProfile']}"}
    ]
    text = rendered.one("ConfigMap")["data"]["profile.json"]
    assert json.loads(text) == json.loads((chart / "files/seccomp/agent-v1.json").read_text())


@pytest.mark.parametrize("kind", ["RuntimeDefault", "Unconfined"])
def test_other_profiles_need_no_file(render: Callable[..., Any], kind: str) -> None:
    rendered = render({"agent": {"seccomp": {"type": kind}}})
    pod = rendered.pods["DaemonSet"]
    assert "initContainers" not in pod
    assert not rendered.of_kind("ConfigMap")
    assert pod["containers"][0]["securityContext"]["seccompProfile"] == {"type": kind}


# -- API types and paths -------------------------------------------------------------------------


def test_the_charts_api_types_are_the_generated_ones(root: Path, chart: Path) -> None:
    ours = {p.name: p.read_bytes() for p in (chart / "files/crds").glob("*.yaml")}
    generated = {p.name: p.read_bytes() for p in (root / "crds").glob("*.yaml")}
    assert ours == generated, "copy crds/*.yaml to charts/kvtier/files/crds"


def test_uninstalling_keeps_the_api_types_unless_told_otherwise(
    render: Callable[..., Any],
) -> None:
    kept = render().of_kind("CustomResourceDefinition")
    assert {c["metadata"]["name"] for c in kept} == {
        "kvtierpolicies.kvtier.io",
        "kvtiernodes.kvtier.io",
    }
    for crd in kept:
        assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    for crd in render({"crds": {"keep": False}}).of_kind("CustomResourceDefinition"):
        assert "helm.sh/resource-policy" not in crd["metadata"].get("annotations", {})
    assert not render({"crds": {"install": False}}).of_kind("CustomResourceDefinition")


def test_a_policy_has_no_field_for_a_path_on_a_node(root: Path) -> None:
    crd = yaml.safe_load((root / "crds/kvtier.io_kvtierpolicies.yaml").read_text())
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    fields = {path.split(".")[-2] for path, _ in scalars(spec) if path.endswith(".description")}
    assert {"tiers", "nvme", "volumes", "durability"} <= fields
    assert not [f for f in fields if "path" in f.lower() or "dir" in f.lower()]
    volumes = spec["properties"]["tiers"]["properties"]["nvme"]["properties"]["volumes"]
    (rule,) = volumes["items"]["x-kubernetes-validations"]
    (pattern,) = re.findall(r"matches\('(.*)'\)", rule["rule"])
    assert re.search(pattern, "data0")
    assert not re.search(pattern, "/mnt/data0")


def test_host_paths_come_from_values_alone(render: Callable[..., Any]) -> None:
    pod = render(EVERYTHING).pods["DaemonSet"]
    paths = {v["hostPath"]["path"] for v in pod["volumes"] if "hostPath" in v}
    assert paths == {
        "/mnt/nvme0/kvtier",
        "/mnt/nvme1/kvtier",
        "/run/kvtier",
        "/var/lib/kvtier",
        "/dev/shm/kvtier",
        "/var/lib/kubelet/seccomp",
    }
    assert not [v for v in render(EVERYTHING).pods["Deployment"]["volumes"] if "hostPath" in v]


# -- the admission policy ------------------------------------------------------------------------


def test_the_admission_policy_is_about_the_agents_account_alone(
    render: Callable[..., Any],
) -> None:
    rendered = render({"fullnameOverride": "cache"})
    policy = rendered.one("ValidatingAdmissionPolicy")
    binding = rendered.one("ValidatingAdmissionPolicyBinding")
    assert binding["spec"] == {
        "policyName": policy["metadata"]["name"],
        "validationActions": ["Deny"],
    }
    assert policy["spec"]["failurePolicy"] == "Fail"
    (condition,) = policy["spec"]["matchConditions"]
    account = rendered.pods["DaemonSet"]["serviceAccountName"]
    assert f"'system:serviceaccount:kvtier-system:{account}'" in condition["expression"]


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"volums": []}, "volums"),
        ({"volumes": [{"name": "Data0", "hostPath": "/mnt"}]}, "/volumes/0/name"),
        ({"volumes": [{"name": "data0", "hostPath": "mnt"}]}, "/volumes/0/hostPath"),
        ({"volumes": [{"name": "data0", "hostPath": "/"}]}, "/volumes/0/hostPath"),
        (
            {"volumes": [{"name": "a", "hostPath": "/x"}, {"name": "a", "hostPath": "/y"}]},
            'volumes: "a" is there twice; give each volume a name of its own',
        ),
        (
            {"volumes": [{"name": "a", "hostPath": "/x"}, {"name": "b", "hostPath": "/x"}]},
            "volumes[1].hostPath: /x is /x of volumes[0].hostPath; each needs a folder of its own",
        ),
        ({"domains": []}, "/domains"),
        (
            {"domains": [{"name": "a"}, {"name": "a", "gid": 5}]},
            'domains: "a" is there twice; give each domain a name of its own',
        ),
        ({"domains": [{"name": "a", "gid": 0}]}, "/domains/0/gid"),
        ({"agent": {"memory": "2Gi"}}, "agent.memory: 2Gi is too little; write more than 2Gi"),
        ({"agent": {"memory": "2048Mi"}}, "agent.memory: 2048Mi is too little"),
        ({"agent": {"memory": "lots"}}, "/agent/memory"),
        ({"agent": {"capabilities": ["SYS_ADMIN"]}}, "/agent/capabilities/0"),
        ({"agent": {"settings": {"run_dir": "/x"}}}, "agent.settings.run_dir: the chart sets this"),
        ({"operator": {"replicas": 2}}, "replicas"),
        (
            {"prometheusRule": {"l0HitRate": {"criticalPercent": 70}}},
            "prometheusRule.l0HitRate: criticalPercent 70 must be below warningPercent 60",
        ),
    ],
)
def test_values_that_make_no_sense_are_refused(
    render: Callable[..., Any], values: dict[str, Any], said: str
) -> None:
    assert said in render(values, refused=True).error


def test_without_agents_nothing_of_theirs_is_made(render: Callable[..., Any]) -> None:
    objects = render({**EVERYTHING, "agent": {"enabled": False}}).objects
    assert {o["kind"] for o in objects} >= {"Deployment", "CustomResourceDefinition"}
    for o in objects:
        component = o["metadata"].get("labels", {}).get("app.kubernetes.io/component")
        assert component != "agent" or o["kind"] == "PrometheusRule", o["kind"]


def test_monitoring_objects_are_made_on_demand(render: Callable[..., Any]) -> None:
    assert not {"ServiceMonitor", "PrometheusRule"} & {o["kind"] for o in render().objects}
    rendered = render(EVERYTHING)
    assert len(rendered.of_kind("ServiceMonitor")) == 2
    services = {
        o["metadata"]["labels"]["app.kubernetes.io/component"]: o
        for o in rendered.of_kind("Service")
    }
    for monitor in rendered.of_kind("ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"]
        service = services[wanted["app.kubernetes.io/component"]]
        assert wanted.items() <= service["metadata"]["labels"].items()
        assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
