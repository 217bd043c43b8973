"""Values that would clash, be cut, or hand the node's root to the agent are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Values = dict[str, Any]
PLACES: dict[str, Callable[[str], Values]] = {
    "volumes[0].hostPath": lambda path: {"volumes": [{"name": "data0", "hostPath": path}]},
    "agent.runDir": lambda path: {"agent": {"runDir": path}},
    "agent.stateDir": lambda path: {"agent": {"stateDir": path}},
    "agent.sharedMemory.hostPath": lambda path: {"agent": {"sharedMemory": {"hostPath": path}}},
    "agent.seccomp.kubeletFolder": lambda path: {"agent": {"seccomp": {"kubeletFolder": path}}},
}


@pytest.mark.parametrize(
    "path", ["//", "/mnt/..", "/mnt/./a", "/mnt//a", "/mnt/a/", "/mnt/a ", "/mnt/$(NODE_NAME)"]
)
def test_a_path_that_is_not_plain_is_refused(render: Callable[..., Any], path: str) -> None:
    for value, values in PLACES.items():
        said = render(values(path), refused=True).error
        assert f'{value}: "{path}" is refused; write the plain path of a folder below /' in said


def test_the_root_of_a_node_is_refused(render: Callable[..., Any]) -> None:
    for values in PLACES.values():
        render(values("/"), refused=True)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"volumes": [{"name": "a", "hostPath": "/m/a"}, {"name": "b", "hostPath": "/m/a/b"}]},
            "volumes[1].hostPath: /m/a/b is inside /m/a of volumes[0].hostPath",
        ),
        (
            {"volumes": [{"name": "a", "hostPath": "/m/a/b"}, {"name": "b", "hostPath": "/m/a"}]},
            "volumes[1].hostPath: /m/a contains /m/a/b of volumes[0].hostPath",
        ),
        (
            {"agent": {"runDir": "/var/lib/kvtier"}},
            "agent.stateDir: /var/lib/kvtier is /var/lib/kvtier of agent.runDir",
        ),
        (
            {"agent": {"stateDir": "/dev/shm/kvtier/state"}},
            "agent.sharedMemory.hostPath: /dev/shm/kvtier contains /dev/shm/kvtier/state",
        ),
        (
            {"volumes": [{"name": "a", "hostPath": "/run"}]},
            "volumes[0].hostPath: /run contains /run/kvtier of agent.runDir",
        ),
        ({"agent": {"runDir": "/tmp"}}, "agent.runDir: /tmp is the container's own"),
        ({"agent": {"runDir": "/volumes/data0"}}, "agent.runDir: /volumes/data0 is inside"),
        (
            {"agent": {"runDir": "/dev/shm", "sharedMemory": {"hostPath": ""}}},
            "agent.runDir: /dev/shm contains /dev/shm/kvtier of the Pod's own shared memory",
        ),
        (
            {"domains": [{"name": "a", "gid": 5}, {"name": "b"}, {"name": "c", "gid": 5}]},
            'domains: "a" and "c" both have gid 5',
        ),
        (
            {"commonLabels": {"app.kubernetes.io/name": "x"}},
            "commonLabels: the chart writes app.kubernetes.io/name itself",
        ),
        (
            {"commonLabels": {"a": "x"}, "serviceMonitor": {"labels": {"a": "y"}}},
            "serviceMonitor.labels: a is in commonLabels too",
        ),
        ({"fullnameOverride": "Foo_Bar"}, "/fullnameOverride"),
    ],
)
def test_values_that_clash_are_refused(
    render: Callable[..., Any], values: Values, said: str
) -> None:
    assert said in render(values, refused=True).error


def test_neighbours_do_not_clash(render: Callable[..., Any]) -> None:
    volumes = [{"name": "a", "hostPath": "/mnt/a"}, {"name": "b", "hostPath": "/mnt/ab"}]
    domains = [{"name": "a", "gid": 5}, {"name": "b", "gid": 6}, {"name": "c"}, {"name": "d"}]
    pod = render({"volumes": volumes, "domains": domains}).pods["DaemonSet"]
    paths = [v["hostPath"]["path"] for v in pod["volumes"] if v["name"].startswith("volume-")]
    assert paths == ["/mnt/a", "/mnt/ab"]


@pytest.mark.parametrize("memory", ["2049Mi", "3Gi", "2500Mi", "1Ti"])
def test_memory_above_what_the_agent_keeps_is_taken(
    render: Callable[..., Any], memory: str
) -> None:
    (agent,) = render({"agent": {"memory": memory}}).pods["DaemonSet"]["containers"]
    assert agent["resources"]["limits"]["memory"] == memory


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({name: None}, f"missing property '{name}'")
        for name in ("agent", "operator", "domains", "prometheusRule", "serviceMonitor", "crds")
    ]
    + [
        ({"agent": {name: None}}, f"missing property '{name}'")
        for name in ("sharedMemory", "seccomp", "image", "updateStrategy", "runDir", "memory")
    ]
    + [
        ({"agent": {"sharedMemory": {"hostPath": None}}}, "missing property 'hostPath'"),
        ({"prometheusRule": {"l0HitRate": None}}, "missing property 'l0HitRate'"),
    ],
)
def test_a_value_that_is_needed_and_null_is_named(
    render: Callable[..., Any], values: Values, said: str
) -> None:
    error = render(values, refused=True).error
    assert said in error
    assert "nil pointer" not in error


def test_an_annotation_of_the_charts_own_can_be_changed_and_is_there_once(
    render: Callable[..., Any],
) -> None:
    key = "kubectl.kubernetes.io/default-container"
    for given, expected in (({}, "agent"), ({key: "other"}, "other"), (None, "agent")):
        pod = render({"agent": {"podAnnotations": given}}).one("DaemonSet")["spec"]["template"]
        assert pod["metadata"]["annotations"] == {key: expected}


def test_values_that_may_be_null(render: Callable[..., Any]) -> None:
    nothing = {"nodeSelector": None, "tolerations": None, "affinity": None, "settings": None}
    assert render({"agent": nothing, "operator": nothing, "volumes": None, "commonLabels": None})


def test_values_are_quoted_and_never_cut(render: Callable[..., Any]) -> None:
    rendered = render(
        {
            "agent": {"runDir": "/run/kv #x", "priorityClassName": "123"},
            "prometheusRule": {
                "enabled": True,
                "runbookURL": "https://x/y: z #q",
                "evictionRate": {"warningPagesPerMinute": 20000000},
                "l0HitRate": {"minLookups": 5000000},
            },
        }
    )
    pod = rendered.pods["DaemonSet"]
    (agent,) = pod["containers"]
    environment = {e["name"]: e.get("value") for e in agent["env"]}
    assert environment["KVTIER_AGENT_RUN_DIR"] == "/run/kv #x"
    assert {m["name"]: m["mountPath"] for m in agent["volumeMounts"]}["run"] == "/run/kv #x"
    assert {v["name"]: v for v in pod["volumes"]}["run"]["hostPath"]["path"] == "/run/kv #x"
    assert pod["priorityClassName"] == "123"
    evictions, hits, _ = rendered.one("PrometheusRule")["spec"]["groups"][0]["rules"]
    assert evictions["annotations"]["runbook_url"] == "https://x/y: z #q#kvtierevictionratehigh"
    assert "> 20000000" in evictions["expr"]
    assert "More than 20000000 pages" in evictions["annotations"]["description"]
    assert ">= 5000000" in hits["expr"]
