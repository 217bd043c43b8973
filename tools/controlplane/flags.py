"""How each program is called. Paths are relative to the control plane's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

AUDIT_POLICY: dict[str, Any] = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {
            "level": "Metadata",
            "verbs": ["create", "update", "patch", "delete", "deletecollection"],
        },
        {"level": "None"},
    ],
}
"""Every write, and only its metadata; one line per write, when it has been answered."""


def etcd() -> list[str]:
    # One member that nobody joins: the advertised addresses are never dialled, but etcd insists
    # on host and port. The listeners are sockets in the control plane's folder.
    peer = "http://localhost:2380"
    return [
        "--name=kvtier",
        "--data-dir=etcd",
        "--listen-client-urls=unix://etcd.sock",
        "--advertise-client-urls=http://localhost:2379",
        "--listen-peer-urls=unix://etcd-peer.sock",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=kvtier={peer}",
        # What is lost in a power cut is a test's data.
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def kube_apiserver(port: int) -> list[str]:
    return [
        "--etcd-servers=unix://etcd.sock",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        # Not found out from the routing table, which a machine without a network lacks; and not
        # published as the endpoint of the service "kubernetes", where loopback is refused.
        "--advertise-address=127.0.0.1",
        "--endpoint-reconciler-type=none",
        "--service-cluster-ip-range=10.0.0.0/24",
        "--authorization-mode=Node,RBAC",
        "--client-ca-file=pki/ca.crt",
        "--tls-cert-file=pki/apiserver.crt",
        "--tls-private-key-file=pki/apiserver.key",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        "--service-account-key-file=pki/sa.pub",
        "--service-account-signing-key-file=pki/sa.key",
        "--allow-privileged=true",
        "--profiling=false",
    ]


def audit() -> list[str]:
    return [
        "--audit-policy-file=audit-policy.json",
        "--audit-log-path=audit.jsonl",
        # Nothing is dropped or batched. A line may still come after others can see the object.
        "--audit-log-mode=blocking",
    ]


def kube_controller_manager(kubeconfig: Path) -> list[str]:
    return [
        f"--kubeconfig={kubeconfig}",
        # No port to listen on, nobody to elect against.
        "--secure-port=0",
        "--leader-elect=false",
        "--use-service-account-credentials=true",
        "--service-account-private-key-file=pki/sa.key",
        "--root-ca-file=pki/ca.crt",
    ]


def kube_scheduler(kubeconfig: Path) -> list[str]:
    return [f"--kubeconfig={kubeconfig}", "--secure-port=0", "--leader-elect=false"]


def kwok(kubeconfig: Path, stages: Path) -> list[str]:
    return [
        f"--kubeconfig={kubeconfig}",
        f"--config={stages}",
        # It plays the kubelet of the nodes that are marked for it, and of no others.
        "--manage-all-nodes=false",
        "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
        "--node-lease-duration-seconds=40",
    ]
