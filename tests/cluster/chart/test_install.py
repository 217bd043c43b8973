"""helm against a real API server: install, upgrade, uninstall, and a dry run of every object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from controlplane.testing import eventually

CHART = Path(__file__).parents[3] / "charts" / "kvtier"
NAMESPACE = "kvtier-system"
CRDS = ("kvtierpolicies.kvtier.io", "kvtiernodes.kvtier.io")

INSTALLED = {
    "volumes": [{"name": "data0", "hostPath": "/mnt/data0"}],
    "domains": [{"name": "default", "gid": 23000}],
}
"""By the fixture `installed`."""

# The types of these come with the Prometheus operator.
FOREIGN = ("ServiceMonitor", "PrometheusRule")


def crd(cluster: Any, name: str) -> dict[str, Any]:
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"
    found: dict[str, Any] = cluster.kube.api.get(path)
    return found


def established(cluster: Any) -> bool:
    return all(
        {"type": "Established", "status": "True"}.items() <= condition.items()
        for name in CRDS
        for condition in crd(cluster, name)["status"]["conditions"]
        if condition["type"] == "Established"
    )


def test_lint_finds_nothing(installed: Any) -> None:
    done = installed.helm("lint", "--strict", str(CHART))
    assert "[WARNING]" not in done.stdout
    assert "0 chart(s) failed" in done.stdout


def test_install_brings_types_accounts_and_workloads(installed: Any) -> None:
    eventually(lambda: established(installed), what="both API types")
    deployment = json.loads(
        installed.plane.kubectl(
            "get", "deployment", "kvtier-operator", "-n", NAMESPACE, "-o", "json"
        ).stdout
    )
    assert deployment["spec"]["strategy"]["type"] == "Recreate"
    daemonset = json.loads(
        installed.plane.kubectl(
            "get", "daemonset", "kvtier-agent", "-n", NAMESPACE, "-o", "json"
        ).stdout
    )
    agent = daemonset["spec"]["template"]["spec"]["containers"][0]
    assert "--volume=data0=/volumes/data0" in agent["args"]
    explained = installed.kube.explain("ktp.spec.tiers")
    assert "KVTierPolicy" in explained


def test_notes_say_where_engines_connect(installed: Any) -> None:
    notes = installed.helm("get", "notes", "kvtier", "--namespace", NAMESPACE).stdout
    assert "/run/kvtier/default.sock with supplementalGroups [23000]" in notes


def test_every_object_passes_a_server_side_dry_run(installed: Any) -> None:
    values = {
        "volumes": [{"name": "data0", "hostPath": "/mnt/data0"}],
        "domains": [{"name": "search", "gid": 23000}, {"name": "chat", "gid": 23001}],
        "agent": {"settings": {"lease_seconds": 60}},
        "serviceMonitor": {"enabled": True},
        "prometheusRule": {"enabled": True},
    }
    text = installed.helm(
        *("template", "kvtier", str(CHART), "--namespace", NAMESPACE),
        *("--kube-version", "1.36.0"),
        values=values,
    ).stdout
    objects = [o for o in yaml.safe_load_all(text) if o]
    assert {o["kind"] for o in objects} >= set(FOREIGN)
    done = installed.plane.kubectl(
        *("apply", "--server-side", "--force-conflicts", "--dry-run=server", "-f", "-"),
        input=yaml.safe_dump_all([o for o in objects if o["kind"] not in FOREIGN]),
    )
    assert len(done.stdout.splitlines()) == len(objects) - 3
    assert "Warning" not in done.stderr


def test_what_is_installed_can_be_applied_by_others_with_the_same_values(installed: Any) -> None:
    """Argo CD, say, without force: no default that the API server adds makes a conflict."""
    text = installed.helm(
        *("template", "kvtier", str(CHART), "--namespace", NAMESPACE, "--kube-version", "1.36.0"),
        values=INSTALLED,
    ).stdout
    done = installed.plane.kubectl(
        *("apply", "--server-side", "--dry-run=server", "-f", "-"), input=text
    )
    assert "kvtiernodes.kvtier.io" in done.stdout


def test_upgrade_brings_new_fields_and_uninstall_keeps_policies(bare: Any, tmp_path: Path) -> None:
    bare.install()
    eventually(lambda: established(bare), what="both API types")
    # An older chart's type: one printer column less than the chart's.
    column = crd(bare, CRDS[0])["spec"]["versions"][0]["additionalPrinterColumns"]
    bare.plane.kubectl(
        *("patch", "crd", CRDS[0], "--type=json", "-p"),
        '[{"op": "remove", "path": "/spec/versions/0/additionalPrinterColumns/0"}]',
    )
    bare.helm(
        *("upgrade", "kvtier", str(CHART), "--namespace", NAMESPACE, "--force-conflicts"),
        values={"operator": {"memory": "640Mi"}},
    )
    assert crd(bare, CRDS[0])["spec"]["versions"][0]["additionalPrinterColumns"] == column
    bare.kube.apply(
        {
            "apiVersion": "kvtier.io/v1alpha1",
            "kind": "KVTierPolicy",
            "metadata": {"name": "kept"},
            "spec": {
                "nodeSelector": {"matchLabels": {"pool": "kept"}},
                "tiers": {"hbm": {"size": "1Gi"}, "dram": {"size": "4Gi"}},
                "valueDensity": {"model": "classic"},
            },
        }
    )
    bare.helm("uninstall", "kvtier", "--namespace", NAMESPACE)
    assert bare.plane.kubectl("get", "ktp", "-o", "name").stdout.split() == [
        "kvtierpolicy.kvtier.io/kept"
    ]
    remaining = bare.plane.kubectl(
        "get", "deployment,daemonset,serviceaccount", "-n", NAMESPACE, "-o", "name"
    ).stdout
    assert "kvtier" not in remaining
    # The next install finds the types that it left.
    bare.install()
    assert bare.kube.get("ktp", "kept")["spec"]["tiers"]["hbm"]["size"] == "1Gi"
