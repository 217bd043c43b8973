"""A file is taken by ``kubectl apply`` and by ``kvtier policy validate``, or by neither."""

from __future__ import annotations

import json
from pathlib import Path

from controlplane.testing import Kube
from kvtier_cli.main import app
from specgen import policy
from typer.testing import CliRunner

OBJECT = policy({"valueDensity": {"model": "classic"}}, "one")
OTHER = policy({"valueDensity": {"model": "classic"}}, "two")
YAML = """\
apiVersion: kvtier.io/v1alpha1
kind: KVTierPolicy
metadata: {name: one}
spec:
  valueDensity:
    model: classic
"""
LIST = {"apiVersion": "kvtier.io/v1alpha1", "kind": "KVTierPolicyList", "metadata": {}}
NOTE = "x" * (200 << 10)
TAKEN = {
    "tabs.json": json.dumps(OBJECT, indent="\t"),
    "two.json": f"{json.dumps(OBJECT)}\n{json.dumps(OTHER)}\n",
    "list.json": json.dumps({**LIST, "items": [OBJECT, OTHER]}),
    "plain-list.json": json.dumps({"apiVersion": "v1", "kind": "List", "items": [OBJECT]}),
    "tab-after-colon.yaml": YAML.replace("model: ", "model:\t"),
    "flow.yaml": "{apiVersion: kvtier.io/v1alpha1, kind: KVTierPolicy,\n\tmetadata: {name: one}, "
    "spec: {valueDensity: {model: classic}}}\n",
    "comments.yaml": YAML + "".join(f"# {NOTE}\n" for _ in range(9)),
}
REFUSED = {
    "version.yaml": f"%YAML 1.1\n---\n{YAML}",
    "tag.yaml": f"%TAG ! tag:example.com,2026:\n---\n{YAML}",
    "tab-indent.yaml": YAML.replace("    model", "\tmodel"),
    "null-key.yaml": YAML.replace("{name: one}", "{name: one, labels: {null: x}}"),
    "finalizer.yaml": YAML.replace("{name: one}", "{name: one, finalizers: [foo bar]}"),
    "time.yaml": YAML.replace("{name: one}", "{name: one, creationTimestamp: yesterday}"),
}


def test_files_are_read_as_kubectl_reads_them(kube: Kube, tmp_path: Path) -> None:
    """One test over all files: what a single one costs is the clean slate before it."""
    wrong = {}
    for name, text in {**TAKEN, **REFUSED}.items():
        file = tmp_path / name
        file.write_text(text)
        server = kube.kubectl("apply", "--dry-run=server", "-f", str(file), check=False)
        here = CliRunner().invoke(app, ["policy", "validate", str(file)])
        codes = (server.returncode, here.exit_code)
        if codes != ((0, 0) if name in TAKEN else (1, 1)):
            wrong[name] = (codes, server.stderr, here.output)
    assert wrong == {}
