"""The control plane is a real one: it refuses, remembers, records, and goes away."""

from __future__ import annotations

import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from controlplane import ControlPlane, ControlPlaneError, launcher
from controlplane.api import ApiClient, ApiError
from controlplane.catalog import TOOLS
from controlplane.testing import Kube


def test_serves_the_pinned_version_in_the_namespaces_of_kubernetes(kube: Kube) -> None:
    assert kube.api.get("/version")["gitVersion"] == TOOLS["kube-apiserver"].version
    assert f"Server Version: {TOOLS['kube-apiserver'].version}" in kube.kubectl("version").stdout
    names = {item["metadata"]["name"] for item in kube.list("namespaces")}
    assert {"default", "kube-system"} <= names


def test_rbac_denies_what_nothing_grants(kube: Kube) -> None:
    bob = kube.plane.user_kubeconfig("bob", ["devs"])
    refused = kube.kubectl("get", "nodes", kubeconfig=bob, check=False)
    assert refused.returncode == 1
    assert 'User "bob" cannot list resource "nodes"' in refused.stderr

    kube.kubectl("create", "clusterrole", "look", "--verb=list", "--resource=nodes")
    kube.kubectl("create", "clusterrolebinding", "look", "--clusterrole=look", "--group=devs")

    def allowed() -> bool:
        asked = kube.kubectl("get", "nodes", kubeconfig=bob, check=False)
        return asked.returncode == 0

    kube.eventually(allowed, what="the group's binding counts")
    stranger = kube.plane.user_kubeconfig("bob", ["others"])
    assert kube.kubectl("get", "nodes", kubeconfig=stranger, check=False).returncode == 1


def test_nobody_gets_in_without_a_credential_of_this_control_plane(kube: Kube) -> None:
    for token in ("", "made-up"):
        client = ApiClient(kube.plane.token_kubeconfig(token))
        with pytest.raises(ApiError) as refused:
            client.get("/api/v1/nodes")
        client.close()
        assert refused.value.status in (401, 403)


def test_a_service_account_token_is_who_it_says(kube: Kube) -> None:
    kube.kubectl("create", "serviceaccount", "agent")
    token = kube.kubectl("create", "token", "agent").stdout.strip()
    who = kube.kubectl("auth", "whoami", kubeconfig=kube.plane.token_kubeconfig(token)).stdout
    assert "system:serviceaccount:default:agent" in who


def test_kubectl_refusal_is_raised_with_its_text(control_plane: ControlPlane) -> None:
    with pytest.raises(ControlPlaneError, match=r"kubectl get nothing: .*resource type"):
        control_plane.kubectl("get", "nothing")


def test_private_files_are_private_and_etcd_has_no_port(control_plane: ControlPlane) -> None:
    secrets = [*control_plane.root.glob("pki/*.key"), *control_plane.root.glob("kubeconfigs/*")]
    assert len(secrets) >= 4
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets} == {0o600}
    assert (control_plane.root / "etcd.sock").is_socket()


def test_an_outage_keeps_port_and_data(kube: Kube) -> None:
    plane = kube.plane
    kube.kubectl("create", "configmap", "kept", "--from-literal=a=b")
    url = plane.url

    plane.stop_apiserver()
    with pytest.raises(OSError, match="refused"):
        plane.api().get("/readyz")
    down = kube.kubectl("get", "configmaps", check=False)
    assert down.returncode != 0

    plane.start_apiserver()
    plane.start_apiserver()  # Running already: nothing to do.
    assert plane.url == url
    kept = kube.find("configmaps", "kept")
    assert kept is not None
    assert kept["data"] == {"a": "b"}


def test_every_write_is_recorded_and_no_read(kube: Kube) -> None:
    bob = kube.plane.user_kubeconfig("bob")
    start = kube.plane.audit_log.stat().st_size
    kube.kubectl("create", "configmap", "seen")
    kube.kubectl("get", "configmap", "seen")
    kube.kubectl("delete", "configmap", "seen")
    kube.kubectl("create", "configmap", "refused", kubeconfig=bob, check=False)

    events = kube.plane.audit_events(start)
    assert {event["verb"] for event in events} <= {
        *("create", "update", "patch", "delete", "deletecollection")
    }
    mine = [
        (event["user"]["username"], event["verb"], event["responseStatus"]["code"])
        for event in events
        if event["objectRef"]["resource"] == "configmaps"
        and event["objectRef"]["namespace"] == "default"
    ]
    assert mine == [
        ("kubernetes-admin", "create", 201),
        ("kubernetes-admin", "delete", 200),
        ("bob", "create", 403),
    ]
    assert not any("requestObject" in event or "responseObject" in event for event in events)


def test_a_failing_start_shows_the_end_of_the_log_and_leaves_nothing(
    tmp_path: Path, programs_in: Callable[[Path], list[int]]
) -> None:
    plane = ControlPlane(tmp_path / "plane", apiserver_flags=["--no-such-flag"])
    with pytest.raises(ControlPlaneError) as failed:
        plane.start()
    message = str(failed.value)
    assert "kube-apiserver ended with status" in message
    assert "unknown flag: --no-such-flag" in message
    assert str(tmp_path / "plane" / "kube-apiserver.log") in message
    assert programs_in(tmp_path / "plane") == []


def test_an_unknown_program_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kubelet: not one of kube-controller-manager"):
        ControlPlane(tmp_path, with_=["kubelet"])


def test_one_folder_is_for_one_control_plane(control_plane: ControlPlane) -> None:
    with pytest.raises(ControlPlaneError, match="another control plane runs in"):
        ControlPlane(control_plane.root).start()
    control_plane.check()


def test_starts_on_another_port_from_a_thread_and_again_on_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs_in: Callable[[Path], list[int]]
) -> None:
    root = tmp_path / "plane"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        find_port = launcher.free_port
        ports = iter([taken.getsockname()[1]])
        monkeypatch.setattr(launcher, "free_port", lambda: next(ports, None) or find_port())

        # The thread is gone while the programs are still wanted.
        plane = ControlPlane(root)
        starter = threading.Thread(target=plane.start)
        starter.start()
        starter.join()
        assert not plane.url.endswith(f":{taken.getsockname()[1]}")
        plane.check()
        plane.kubectl("create", "configmap", "kept")
        plane.stop()
    assert programs_in(root) == []

    with ControlPlane(root) as again:
        assert again.kubectl("get", "configmap", "kept", "-o", "name").stdout == "configmap/kept\n"
    assert programs_in(root) == []
