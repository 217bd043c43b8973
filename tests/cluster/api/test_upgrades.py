"""Upgrading the CRDs of a release in a running cluster starts no rollout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from controlplane.testing import Kube
from kvtier_api import KVTierPolicy, manifest, revision_hash

ROOT = Path(__file__).parents[3]
RELEASES = sorted((ROOT / "tests" / "contract" / "releases").iterdir())


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_stored_policies_keep_their_revision(kube: Kube, release: Path) -> None:
    """As stored by the release, with its defaults written out, and read through today's CRDs."""
    kept = json.loads((release / "hashes.json").read_text())
    kube.define(yaml.safe_load(p.read_text()) for p in sorted((release / "crds").glob("*.yaml")))
    names = {}
    for path in sorted((release / "policies").glob("*.yaml")):
        (document,) = manifest.read(path)
        (stored,) = kube.apply(document.obj)
        names[stored["metadata"]["name"]] = kept[path.name]
    before = {item["metadata"]["name"]: item["metadata"] for item in kube.list("ktp")}
    for path in sorted((ROOT / "crds").glob("*.yaml")):
        # In place, as an upgrade does it: the objects stay.
        kube.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(path))
    for name, expected in names.items():
        now = kube.get("ktp", name)
        assert revision_hash(KVTierPolicy.read(now).spec) == expected
        assert now["metadata"]["generation"] == before[name]["generation"]
        (again,) = kube.apply(
            {key: now[key] for key in ("apiVersion", "kind", "spec")} | {"metadata": {"name": name}}
        )
        assert revision_hash(KVTierPolicy.read(again).spec) == expected
