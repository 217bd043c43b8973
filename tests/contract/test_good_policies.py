"""The policies in ``examples/`` are valid, and between them use every field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvtier_api import manifest, validate
from kvtier_api.crd import schema
from kvtier_api.policy import KVTierPolicy

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples" / "policies").glob("*.yaml"))


def fields(node: dict[str, Any], path: str = "") -> set[str]:
    found = {path} if path else set()
    for name, child in node.get("properties", {}).items():
        found |= fields(child, f"{path}.{name}".strip("."))
    return found | fields(node["items"], path) if "items" in node else found


def written(value: Any, path: str = "") -> set[str]:
    if isinstance(value, dict):
        below = {
            p for name, item in value.items() for p in written(item, f"{path}.{name}".strip("."))
        }
        return below | {path}
    if isinstance(value, list):
        return {path}.union(*(written(item, path) for item in value))
    return {path}


def test_examples_are_valid() -> None:
    assert len(FILES) >= 5
    for path in FILES:
        for document in manifest.read(path):
            assert validate(document.obj) == [], path.name


def test_the_reference_has_every_field() -> None:
    """Of two fields of which one must be chosen, another example shows the second."""
    known = fields(schema(KVTierPolicy)["properties"]["spec"])
    used = {
        path for file in FILES for doc in manifest.read(file) for path in written(doc.obj["spec"])
    }
    assert known - used == set()
    (reference,) = manifest.read(ROOT / "examples" / "policies" / "reference.yaml")
    assert known - written(reference.obj["spec"]) == {"tiers.hbm.size", "tiers.dram.size"}
