"""A real operator process against the real API server, under exactly the rights it is given, and
agents that are played by a thread."""

from __future__ import annotations

import copy
import json
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from command_run import PROGRAM
from controlplane import ControlPlane
from controlplane.testing import Kube

NAMESPACE = "kvtier-system"
USER = "system:serviceaccount:kvtier-system:kvtier-operator"
QUIET = 1.0
"""Seconds without a write after which a test takes the operator to be at rest."""

CLUSTER_RULES: list[dict[str, list[str]]] = [
    {"apiGroups": ["kvtier.io"], "resources": ["kvtierpolicies"], "verbs": ["list", "watch"]},
    {"apiGroups": ["kvtier.io"], "resources": ["kvtierpolicies/status"], "verbs": ["patch"]},
    {
        "apiGroups": ["kvtier.io"],
        "resources": ["kvtiernodes"],
        "verbs": ["list", "watch", "create", "patch", "delete"],
    },
    {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "watch"]},
]
OWN_RULES: list[dict[str, list[str]]] = [
    {
        "apiGroups": ["apps"],
        "resources": ["controllerrevisions"],
        "verbs": ["get", "list", "create", "delete"],
    }
]
EVENT_RULES: list[dict[str, list[str]]] = [
    {"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": ["create"]}
]


def grant(kube: Kube) -> None:
    """The operator's rights: nothing else is open to it."""
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    rbac, subjects = "rbac.authorization.k8s.io", [{"kind": "User", "name": USER}]
    grants = [("ClusterRole", "", CLUSTER_RULES), ("Role", NAMESPACE, OWN_RULES)]
    for kind, namespace, rules in [*grants, ("Role", "default", EVENT_RULES)]:
        meta = {"name": "kvtier-operator", **({"namespace": namespace} if namespace else {})}
        role = {"apiVersion": f"{rbac}/v1", "kind": kind, "metadata": meta, "rules": rules}
        binding = {
            "apiVersion": f"{rbac}/v1",
            "kind": f"{kind}Binding",
            "metadata": meta,
            "roleRef": {"apiGroup": rbac, "kind": kind, "name": "kvtier-operator"},
            "subjects": subjects,
        }
        kube.apply(role, binding)


class OperatorProcess:
    """``kvtier operator``, to be started, killed and started again."""

    def __init__(self, kubeconfig: Path, log: Path, settings: tuple[str, ...]) -> None:
        self.log = log
        self._command = [
            *(str(PROGRAM), "operator", "--kubeconfig", str(kubeconfig)),
            *("--http", "127.0.0.1:0", *settings),
        ]
        self.process: subprocess.Popen[bytes] | None = None
        self._logged = 0

    def start(self) -> None:
        assert self.process is None
        self._logged = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(self._command, stderr=out)

    def kill(self) -> None:
        """SIGKILL: no chance to finish anything."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None

    def terminate(self) -> int:
        """SIGTERM, as the kubelet does; its exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(20)
        self.process = None
        return status

    def lines(self) -> list[dict[str, Any]]:
        """What this life has logged."""
        if not self.log.exists():
            return []
        with self.log.open("rb") as handle:
            handle.seek(self._logged)
            return [json.loads(line) for line in handle if line.startswith(b"{")]

    def said(self, event: str) -> bool:
        return any(line["event"] == event for line in self.lines())

    def probe(self, path: str) -> tuple[int, str]:
        """(HTTP status, body)."""
        address = next(line["http"] for line in self.lines() if line["event"] == "started")
        try:
            with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as e:
            return e.code, e.read().decode()


@pytest.fixture(scope="module")
def granted(control_plane: ControlPlane) -> Iterator[None]:
    """The operator's namespace and rights, there before any test's objects and gone afterwards."""
    kube = Kube(control_plane)
    grant(kube)
    yield
    for kind, namespace in (
        ("clusterrolebindings", None),
        ("clusterroles", None),
        ("rolebindings", NAMESPACE),
        ("roles", NAMESPACE),
        ("rolebindings", "default"),
        ("roles", "default"),
    ):
        kube.delete(kind, "kvtier-operator", namespace)


@pytest.fixture(scope="module")
def running() -> Iterator[list[OperatorProcess]]:
    """The process that the tests of a module share, as long as each leaves it as it was."""
    shared: list[OperatorProcess] = []
    yield shared
    for process in shared:
        process.kill()


@pytest.fixture
def operator(
    granted: None, running: list[OperatorProcess], kube: Kube
) -> Iterator[Callable[..., OperatorProcess]]:
    """``operator("--flag", "value")``: a started process that has listed everything. Without
    settings it is the one that the test before has used; ``fresh=True`` gives one of its own.
    ``credentials``: another kubeconfig; needs settings or ``fresh``."""
    kubeconfig = kube.plane.user_kubeconfig(USER)
    own: list[OperatorProcess] = []

    def start(
        *settings: str, wait: bool = True, fresh: bool = False, credentials: Path | None = None
    ) -> OperatorProcess:
        if running and (settings or fresh or running[0].process is None):
            running.pop().kill()  # never two at once
        if running:
            return running[0]
        log = kube.plane.root / f"operator-{time.monotonic_ns()}.log"
        process = OperatorProcess(credentials or kubeconfig, log, settings)
        process.start()
        (own if settings or fresh else running).append(process)
        if wait:
            kube.eventually(lambda: process.said("synced"), what="synced", timeout=60)
        return process

    yield start
    for process in own:
        process.kill()


@pytest.fixture
def take_right(granted: None, kube: Kube) -> Iterator[Callable[[str, str], Callable[[], None]]]:
    """``give_back = take_right("watch", "nodes")``: the operator's ClusterRole without it."""

    def write(rules: list[dict[str, list[str]]]) -> None:
        role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole"}
        kube.apply({**role, "metadata": {"name": "kvtier-operator"}, "rules": rules})

    def take(verb: str, resource: str) -> Callable[[], None]:
        less = copy.deepcopy(CLUSTER_RULES)
        for rule in less:
            if rule["resources"] == [resource]:
                rule["verbs"].remove(verb)
        write(less)
        return lambda: write(CLUSTER_RULES)

    yield take
    write(CLUSTER_RULES)


class Agents:
    """Plays the agent of every node: says that what it was told is in force, at once, and again
    every few seconds."""

    HEARTBEAT_SECONDS = 5.0

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.refusing: set[str] = set()
        """Nodes whose agent says that it cannot apply the revision."""
        self.message = "volume data9 is not mapped on this node"
        self._reported: dict[str, float] = {}

    def report(self) -> int:
        """One round; how many had something to say."""
        reports = 0
        for raw in self._kube.list("kvtiernodes"):
            name, spec, status = raw["metadata"]["name"], raw["spec"], raw.get("status", {})
            recent = time.monotonic() - self._reported.get(name, 0.0) < self.HEARTBEAT_SECONDS
            if status.get("observedGeneration") == raw["metadata"]["generation"] and recent:
                continue
            told = spec.get("stable", {}).get("revision", "")
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            refuses = name in self.refusing
            conditions = [
                ("Ready", "True" if told else "False", "InForce" if told else "NoPolicy", ""),
                (
                    "Stalled",
                    "True" if refuses else "False",
                    "VolumeUnknown" if refuses else "Applied",
                    self.message if refuses else "",
                ),
            ]
            self._kube.apply_status(
                {
                    "apiVersion": "kvtier.io/v1alpha1",
                    "kind": "KVTierNode",
                    "metadata": {"name": name},
                    "status": {
                        "observedGeneration": raw["metadata"]["generation"],
                        "lastReportTime": now,
                        "revision": status.get("revision", "") if refuses else told,
                        "conditions": [
                            {
                                "type": type_,
                                "status": value,
                                "reason": reason,
                                "message": message,
                                "lastTransitionTime": now,
                            }
                            for type_, value, reason, message in conditions
                        ],
                    },
                }
            )
            self._reported[name] = time.monotonic()
            reports += 1
        return reports

    def start(self) -> None:
        def loop() -> None:
            while not self._stop.wait(0.1):
                try:
                    self.report()
                except Exception:  # the API server may be away, objects may go meanwhile
                    continue

        self._thread = threading.Thread(target=loop, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(10)


@pytest.fixture
def agents(kube: Kube) -> Iterator[Agents]:
    """Started agents on every node that has a KVTierNode."""
    playing = Agents(Kube(kube.plane))
    playing.start()
    yield playing
    playing.stop()


@pytest.fixture
def add_nodes(kube: Kube) -> Callable[..., None]:
    """``add_nodes("a", "b", gpu="x")``."""

    def add(*names: str, **labels: str) -> None:
        for name in names:
            meta = {"name": name, "labels": labels}
            kube.apply({"apiVersion": "v1", "kind": "Node", "metadata": meta})

    return add


@pytest.fixture
def apply_policy(kube: Kube) -> Callable[..., dict[str, Any]]:
    """``apply_policy(name, gpu="x", priority=.., page=..)``: by server-side apply, as kubectl."""

    def apply(name: str, *, gpu: str | None = None, **spec: Any) -> dict[str, Any]:
        selector = {"matchLabels": {"gpu": gpu}} if gpu else {}
        (answer,) = kube.apply(
            {
                "apiVersion": "kvtier.io/v1alpha1",
                "kind": "KVTierPolicy",
                "metadata": {"name": name},
                "spec": {
                    "nodeSelector": selector,
                    "valueDensity": {"model": "classic"},
                    **spec,
                },
            }
        )
        return answer

    return apply


@pytest.fixture
def ready_reason(kube: Kube) -> Callable[[str], tuple[str, str] | None]:
    """``ready_reason(policy)``: (status, reason) of Ready for the present generation, or None."""

    def read(name: str) -> tuple[str, str] | None:
        raw = kube.get("kvtierpolicies", name)
        status = raw.get("status", {})
        if status.get("observedGeneration") != raw["metadata"]["generation"]:
            return None
        for condition in status.get("conditions", ()):
            if condition["type"] == "Ready":
                return condition["status"], condition["reason"]
        return None

    return read


@pytest.fixture
def writes(kube: Kube) -> Callable[[], Callable[[], list[tuple[str, str]]]]:
    """``since = writes()`` and later ``since()``: (verb, resource/subresource) of the operator's
    writes in between, by the API server's own audit log.

    ``writes()`` returns once the operator has let `QUIET` seconds pass without a write, so that
    what an earlier step of the test still causes is over. What counts afterwards is when the server
    received a request: a line gets into the log after others can see the object, even with
    ``--audit-log-mode=blocking``, so that the log's length says nothing about what came before.
    """

    def of_operator(mark: int) -> list[dict[str, Any]]:
        return [e for e in kube.plane.audit_events(mark) if e["user"]["username"] == USER]

    def begin() -> Callable[[], list[tuple[str, str]]]:
        size = kube.plane.audit_log.stat().st_size
        quiet_since, seen = time.monotonic(), 0

        def quiet() -> bool:
            nonlocal quiet_since, seen
            if (count := len(of_operator(size))) != seen:
                quiet_since, seen = time.monotonic(), count
            return time.monotonic() - quiet_since >= QUIET

        kube.eventually(quiet, what="the operator writes nothing", timeout=60)
        # The server runs on this machine: one clock.
        start = datetime.now(UTC)

        def found() -> list[tuple[str, str]]:
            out = []
            for event in of_operator(size):
                if datetime.fromisoformat(event["requestReceivedTimestamp"]) < start:
                    continue
                ref = event.get("objectRef", {})
                sub = ref.get("subresource")
                out.append((event["verb"], f"{ref['resource']}/{sub}" if sub else ref["resource"]))
            return out

        return found

    return begin
