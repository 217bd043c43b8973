"""`make image-test`: both images, run for real.

1. What is in them: the operator's user is not root, and it has no torch, compiler or installer.
2. The agent alone, under a policy file. A program in a container of its own, as an ordinary user
   in the domain's group, stores pages through the shared arena, loads them and compares.
3. The operator and the agent under Kubernetes: the chart is installed into a real API server by
   helm, both containers get the tokens that their Pods would get, and a policy that kubectl
   applies is in force on the node; so is an edit of it.

The containers have what the chart gives their Pods: users, capabilities, read-only root, seccomp
profile, environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controlplane import ControlPlane, ToolError, tool_path
from controlplane.launcher import ControlPlaneError
from controlplane.processes import free_port

from image.build import ROOT, WHEELS, reference
from image.containers import SECCOMP, Container, Containers, until
from image.engine import Engine, ImageError

__all__ = ["check"]

GID = 23000
NAMESPACE = "kvtier-system"
EXAMPLE = ROOT / "examples" / "standalone"
TOKENS = "/var/run/secrets/kubernetes.io/serviceaccount"

# Runs inside the operator's image. Modules that must not be importable, programs that must not be
# on PATH.
_NOT_IN_OPERATOR = """
import importlib.util, os, shutil, sys
modules = ("torch", "numpy", "zmq", "pip", "setuptools", "uv")
programs = ("gcc", "cc", "g++", "clang", "make", "pip", "pip3", "uv")
found = [name for name in modules if importlib.util.find_spec(name)]
found += [name for name in programs if shutil.which(name)]
found += ["user 0"] if os.geteuid() == 0 else []
import kvtier_operator.main, kvtier_api
print(",".join(found) or "clean")
"""

# Runs inside the agent's image under the chart's seccomp profile: io_uring_setup (425) works,
# unshare(CLONE_NEWUSER) does not.
_SECCOMP_PROBE = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
ring = libc.syscall(425, 8, ctypes.create_string_buffer(120))
print("io_uring" if ring >= 0 else f"io_uring errno {ctypes.get_errno()}", end=" ")
print("namespaces" if libc.unshare(0x10000000) == 0 else "no namespaces")
"""

# Runs inside the agent's image: does the extension run on its C library?
_NATIVE_PROBE = """
from kvtier_agent import native
from kvtier_agent.native import copier
assert copier.checksum(b"") == 0x2D06800538D394C2
print(native.WHY_NOT or f"native extension, {native.NATIVE.kernels()[-1]}")
"""


def check(engine: Engine, tag: str = "dev") -> None:
    """Runs all of it and prints a line per finding; ImageError says what is wrong."""
    began = time.monotonic()

    def found(text: str) -> None:
        print(f"image-test: {time.monotonic() - began:5.1f} s  {text}", flush=True)

    try:
        with Containers(engine) as containers, tempfile.TemporaryDirectory() as folder:
            _contents(engine, containers, tag)
            found("operator: user 65532, no torch, compiler or installer")
            found(f"agent: {_probe(containers, tag)} under the chart's seccomp profile")
            found(f"agent: {_native(containers, tag)}")
            with _agent_folders(Path(folder), "alone") as folders:
                _alone(containers, tag, folders)
                found("agent alone: pages stored and loaded by a client in another container")
            with (
                _agent_folders(Path(folder), "cluster") as folders,
                ControlPlane(Path(folder) / "plane") as plane,
            ):
                seconds = _cluster(containers, tag, folders, plane, Path(folder))
                found(f"operator and agent: policy in force {seconds[0]:.1f} s after kubectl apply")
                found(f"operator and agent: edit in force {seconds[1]:.1f} s after kubectl apply")
    except (ToolError, ControlPlaneError) as error:
        raise ImageError(str(error)) from None


# -- 1: contents ---------------------------------------------------------------------------------


def _contents(engine: Engine, containers: Containers, tag: str) -> None:
    user = engine.inspect(reference("operator", tag))["Config"]["User"]
    if user != "65532:65532":
        raise ImageError(f"the operator's image runs as {user or 'root'}; it must be 65532:65532")
    for source, python in (("venv", "/opt/kvtier/bin/python"), ("base", "python3")):
        said = containers.once(reference("operator", tag), python, "-c", _contents_probe(source))
        if said.strip() != "clean":
            raise ImageError(f"the operator's image has what it must not have: {said.strip()}")


def _contents_probe(source: str) -> str:
    if source == "venv":
        return _NOT_IN_OPERATOR
    # The base image may carry pip for whoever builds on it; it must not carry torch.
    return "import importlib.util as u; print('torch' if u.find_spec('torch') else 'clean')"


def _probe(containers: Containers, tag: str) -> str:
    said = containers.once(
        *(reference("agent", tag), "/opt/kvtier/bin/python", "-c", _SECCOMP_PROBE),
        options=(f"--security-opt=seccomp={SECCOMP}",),
    ).strip()
    # Where this machine's kernel has none (or an administrator turned it off), the profile cannot
    # give it; anywhere else a refusal is the profile's.
    if said != "io_uring no namespaces" and not (
        said.endswith(" no namespaces") and not _has_io_uring()
    ):
        raise ImageError(f"under the chart's seccomp profile: {said}")
    return said


def _has_io_uring() -> bool:
    """Whether this process gets a ring, outside any container of ours."""
    done = subprocess.run(
        [sys.executable, "-c", _SECCOMP_PROBE.rsplit("print", 1)[0]], capture_output=True, text=True
    )
    return done.stdout.strip() == "io_uring"


def _native(containers: Containers, tag: str) -> str:
    """The extension runs in the image, if the build had a wheel of it."""
    said = containers.once(
        reference("agent", tag), "/opt/kvtier/bin/python", "-c", _NATIVE_PROBE
    ).strip()
    if any(WHEELS.glob("*.whl")) and not said.startswith("native extension"):
        raise ImageError(f"the native extension is not in the agent's image: {said}")
    return said


# -- 2: the agent --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Folders:
    """Host folders of one agent, mounted under the same paths as the chart does."""

    run: Path
    shared: Path
    state: Path
    volume: Path

    @property
    def of_clients(self) -> tuple[str, ...]:
        """Mounts of an engine's Pod."""
        return (f"--volume={self.run}:/run/kvtier", f"--volume={self.shared}:/dev/shm/kvtier")

    @property
    def of_agent(self) -> tuple[str, ...]:
        return (
            *self.of_clients,
            f"--volume={self.state}:/var/lib/kvtier",
            f"--volume={self.volume}:/volumes/data0",
        )


@contextmanager
def _agent_folders(root: Path, name: str) -> Iterator[Folders]:
    with tempfile.TemporaryDirectory(prefix="kvtier-check-", dir="/dev/shm") as shared:
        folders = Folders(
            root / name / "run", Path(shared), root / name / "state", root / name / "v"
        )
        for folder in (folders.run, folders.state, folders.volume):
            folder.mkdir(parents=True)
        # As the kubelet makes them: others may enter, not write.
        for folder in (root, root / name, folders.run, folders.shared):
            folder.chmod(0o755)
        yield folders


def _agent(
    containers: Containers,
    role: str,
    tag: str,
    folders: Folders,
    *arguments: str,
    options: tuple[str, ...] = (),
) -> tuple[Container, str]:
    """(the running agent, its HTTP address)"""
    address = f"127.0.0.1:{free_port()}"
    agent = containers.start(
        *(role, reference("agent", tag), "agent"),
        *("--volume=data0=/volumes/data0", f"--domain=default:{GID}", *arguments),
        options=(
            *("--user=0", f"--group-add={GID}", "--cap-add=IPC_LOCK"),
            f"--security-opt=seccomp={SECCOMP}",
            "--tmpfs=/tmp",
            *folders.of_agent,
            f"--env=KVTIER_AGENT_HTTP={address}",
            "--env=KVTIER_AGENT_SHM_DIR=/dev/shm/kvtier",
            "--env=KVTIER_AGENT_RUN_DIR=/run/kvtier",
            "--env=KVTIER_AGENT_STATE_DIR=/var/lib/kvtier",
            *options,
        ),
    )
    return agent, f"http://{address}"


def _store_and_load(containers: Containers, tag: str, folders: Folders, agent: Container) -> None:
    """The example's client, as a user who has the domain's group and nothing else."""
    try:
        said = containers.once(
            *(reference("agent", tag), "/opt/kvtier/bin/python"),
            *("/example/store_and_load.py", "/run/kvtier/default.sock"),
            options=(
                *("--user=10001:10001", f"--group-add={GID}"),
                *folders.of_clients,
                f"--volume={EXAMPLE}:/example:ro",
            ),
        )
    except ImageError as error:
        raise ImageError(f"{error}\n{agent.logs()}") from None
    if "every byte the same: True" not in said:
        raise ImageError(f"the client said: {said}\n{agent.logs()}")


def _alone(containers: Containers, tag: str, folders: Folders) -> None:
    agent, address = _agent(
        containers,
        *("alone", tag, folders, "--policy=/policy.yaml"),
        options=(f"--volume={EXAMPLE / 'policy.yaml'}:/policy.yaml:ro",),
    )
    agent.answers(f"{address}/readyz")
    _store_and_load(containers, tag, folders, agent)
    agent.stop()


# -- 3: the cluster ------------------------------------------------------------------------------


def _policy(dram: str) -> dict[str, Any]:
    return {
        "apiVersion": "kvtier.io/v1alpha1",
        "kind": "KVTierPolicy",
        "metadata": {"name": "check"},
        "spec": {
            "nodeSelector": {"matchLabels": {"pool": "check"}},
            "tiers": {
                "hbm": {"size": "32Mi"},
                "dram": {"size": dram},
                "nvme": {"size": "256Mi", "volumes": ["data0"], "reservePercent": 1},
            },
            "valueDensity": {"model": "classic"},
        },
    }


def _cluster(
    containers: Containers, tag: str, folders: Folders, plane: ControlPlane, root: Path
) -> tuple[float, float]:
    """Seconds from `kubectl apply` to "in force" of the first policy and of an edit."""
    _install_chart(plane, root / "helm")
    _apply(plane, {"apiVersion": "v1", "kind": "Node",
                   "metadata": {"name": "node-a", "labels": {"pool": "check"}}})  # fmt: skip
    _apply(plane, {"apiVersion": "v1", "kind": "Pod",
                   "metadata": {"name": "agent-a", "namespace": NAMESPACE},
                   "spec": {"nodeName": "node-a", "serviceAccountName": "kvtier-agent",
                            "containers": [{"name": "agent", "image": "agent"}]}})  # fmt: skip
    address = f"127.0.0.1:{free_port()}"
    operator = containers.start(
        *("operator", reference("operator", tag), "operator"),
        options=(
            "--tmpfs=/tmp",
            *_in_cluster(plane, root / "operator-token", "kvtier-operator"),
            f"--env=KVTIER_OPERATOR_NAMESPACE={NAMESPACE}",
            f"--env=KVTIER_OPERATOR_HTTP={address}",
        ),
    )
    operator.answers(f"http://{address}/readyz")
    agent, agent_address = _agent(
        *(containers, "agent", tag, folders),
        options=(
            "--env=NODE_NAME=node-a",
            *_in_cluster(plane, root / "agent-token", "kvtier-agent", "agent-a"),
        ),
    )
    # Ready without a policy too, or a DaemonSet's update would wait for one on every node.
    agent.answers(f"{agent_address}/readyz")

    def logs() -> str:
        seen = plane.kubectl("get", "ktp,ktn", "-o", "yaml", check=False).stdout
        return f"{operator.logs()}\n{agent.logs()}\n{seen}"

    first = _in_force(plane, _policy("64Mi"), logs)
    agent.answers(f"{agent_address}/readyz")
    _store_and_load(containers, tag, folders, agent)
    second = _in_force(plane, _policy("96Mi"), logs)
    agent.stop()
    _retired(plane, logs)
    for container in (operator, agent):
        if "forbidden" in container.logs(lines=10_000):
            raise ImageError(f"{container.name} lacks a right that it uses\n{container.logs()}")
    operator.stop()
    return first, second


def _retired(plane: ControlPlane, logs: Callable[[], str]) -> None:
    """A node that leaves takes its KVTierNode along, and the operator has told of what it did."""
    plane.kubectl("delete", "node", "node-a")
    until(
        lambda: not plane.kubectl("get", "ktn", "-o", "name").stdout.strip(),
        *("KVTierNode node-a is deleted", 30, logs),
    )
    told = plane.kubectl(
        "get", "events.events.k8s.io", "-n", "default", "-o", "jsonpath={.items[*].regarding.kind}"
    ).stdout
    if "KVTierPolicy" not in told:
        raise ImageError(f"no event about the policy in namespace default\n{logs()}")


def _install_chart(plane: ControlPlane, home: Path) -> None:
    done = subprocess.run(
        [
            *(str(tool_path("helm")), "install", "kvtier", str(ROOT / "charts" / "kvtier")),
            *("--namespace", NAMESPACE, "--create-namespace"),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "KUBECONFIG": str(plane.kubeconfig),
            "HELM_CACHE_HOME": str(home / "cache"),
            "HELM_CONFIG_HOME": str(home / "config"),
            "HELM_DATA_HOME": str(home / "data"),
        },
    )
    if done.returncode != 0:
        raise ImageError(f"helm install failed: {done.stderr.strip()}")


def _apply(plane: ControlPlane, item: dict[str, Any]) -> None:
    plane.kubectl("apply", "--server-side", "-f", "-", input=json.dumps(item))


def _in_cluster(plane: ControlPlane, folder: Path, account: str, pod: str = "") -> tuple[str, ...]:
    """Options that give a container what the kubelet gives a Pod of this account."""
    bound = ("--bound-object-kind=Pod", f"--bound-object-name={pod}") if pod else ()
    token = plane.kubectl("create", "token", account, "--namespace", NAMESPACE, *bound).stdout
    folder.mkdir()
    for name, text in (
        ("token", token.strip()),
        ("ca.crt", plane.ca_file.read_text()),
        ("namespace", NAMESPACE),
    ):
        (folder / name).write_text(text)
        (folder / name).chmod(0o644)
    folder.chmod(0o755)
    return (
        f"--volume={folder}:{TOKENS}:ro",
        "--env=KUBERNETES_SERVICE_HOST=127.0.0.1",
        f"--env=KUBERNETES_SERVICE_PORT={plane.url.rpartition(':')[2]}",
    )


def _in_force(plane: ControlPlane, policy: dict[str, Any], logs: Callable[[], str]) -> float:
    """Applies a policy as a user does and waits until its status says that the node obeys it."""
    began = time.monotonic()
    _apply(plane, policy)
    api = plane.api()
    path = "/apis/kvtier.io/v1alpha1"

    def obeyed() -> bool:
        item = api.get(f"{path}/kvtierpolicies/{policy['metadata']['name']}")
        status = item.get("status", {})
        conditions = {c["type"]: c["status"] for c in status.get("conditions", [])}
        node = api.find(f"{path}/kvtiernodes/node-a") or {}
        return (
            status.get("observedGeneration") == item["metadata"]["generation"]
            and conditions.get("Ready") == "True"
            and status.get("activeRevision") == status.get("desiredRevision")
            and status.get("nodes", {}).get("updated") == 1
            and node.get("status", {}).get("revision") == status.get("activeRevision")
        )

    try:
        until(obeyed, "the policy is in force on node-a", 60, logs)
    finally:
        api.close()
    return time.monotonic() - began
