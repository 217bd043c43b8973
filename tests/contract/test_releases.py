"""What a release promised holds in every later one of the same API version.

``python -m freeze vX.Y.Z`` makes the folder of a release. Upgrading the CRD must start no
rollout: a policy that was valid stays valid and keeps its revision.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvtier_api import KVTierPolicy, crd, manifest, revision_hash, validate

RELEASES = sorted((Path(__file__).parent / "releases").iterdir())
BOUNDS = {
    **dict.fromkeys(("minimum", "minLength", "minItems", "minProperties"), -1),
    **dict.fromkeys(("maximum", "maxLength", "maxItems", "maxProperties"), 1),
}


def policies(release: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted((release / "policies").glob("*.yaml")):
        (document,) = manifest.read(path)
        yield path.name, document.obj


def schema(definition: dict[str, Any]) -> dict[str, Any]:
    (version,) = [v for v in definition["spec"]["versions"] if v["name"] == "v1alpha1"]
    found: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return found


def broken(old: dict[str, Any], new: dict[str, Any], path: str = "") -> Iterator[str]:
    """What a schema takes away from an earlier one."""
    for key in ("type", "format", "default", "x-kubernetes-list-type"):
        if old.get(key) != new.get(key) and not (key == "default" and "properties" in old):
            yield f"{path}: {key} was {old.get(key)}, is {new.get(key)}"
    for key, direction in BOUNDS.items():
        if key in new and (key not in old or (new[key] - old[key]) * direction < 0):
            yield f"{path}: {key} was {old.get(key)}, is {new[key]}"
    if missing := set(old.get("enum", [])) - set(new.get("enum", old.get("enum", []))):
        yield f"{path}: {missing} is no value any more"
    if added := set(new.get("required", [])) - set(old.get("required", [])):
        yield f"{path}: {added} is required now"
    for name, child in old.get("properties", {}).items():
        here = f"{path}.{name}".strip(".")
        if name not in new.get("properties", {}):
            yield f"{here}: is gone"
        else:
            yield from broken(child, new["properties"][name], here)
    for key in ("items", "additionalProperties"):
        if isinstance(old.get(key), dict):
            yield from broken(old[key], new[key], f"{path}[]")


def test_the_first_release_is_kept() -> None:
    assert RELEASES
    assert RELEASES[0].name == "v0.1.0"


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_policies_stay_valid_and_keep_their_revision(release: Path) -> None:
    kept = json.loads((release / "hashes.json").read_text())
    assert len(kept) >= 5
    for name, obj in policies(release):
        assert validate(obj) == [], name
        read = KVTierPolicy.read(obj)
        assert revision_hash(read.spec) == kept.pop(name), f"{name} would be a new revision"
    assert kept == {}


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_a_released_field_keeps_type_default_and_range(release: Path) -> None:
    now = crd.crds()
    for path in sorted((release / "crds").glob("*.yaml")):
        then = schema(yaml.safe_load(path.read_text()))
        assert list(broken(then, schema(now[path.name]))) == []


def test_a_changed_default_would_be_noticed() -> None:
    """The comparison above is not blind."""
    field = {"type": "integer", "default": 5, "minimum": 0, "maximum": 9}
    old = {"type": "object", "properties": {"a": field}}
    assert list(broken(old, old)) == []
    for change in ({"default": 6}, {"minimum": 1}, {"maximum": 8}, {"type": "string"}):
        assert list(broken(old, {**old, "properties": {"a": {**field, **change}}}))
    assert list(broken(old, {**old, "properties": {}}))
    assert list(broken(old, {**old, "required": ["a"]}))
