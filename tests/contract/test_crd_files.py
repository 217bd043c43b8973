"""The committed CRDs are those of the models, structural, bounded and described throughout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvtier_api import crd

FOLDER = Path(__file__).parents[2] / "crds"
CRDS = crd.crds()
SCHEMAS = {name: c["spec"]["versions"][0]["schema"]["openAPIV3Schema"] for name, c in CRDS.items()}
Node = tuple[str, dict[str, Any]]


def nodes(node: dict[str, Any], path: str = "") -> Iterator[Node]:
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}".strip("."))
    if isinstance(node.get("additionalProperties"), dict):
        yield from nodes(node["additionalProperties"], f"{path}{{}}")
    if "items" in node:
        yield from nodes(node["items"], f"{path}[]")


ALL = [(name, *node) for name, schema in SCHEMAS.items() for node in nodes(schema)]


@pytest.mark.parametrize("name", CRDS)
def test_files_are_what_the_generator_makes(name: str) -> None:
    committed = (FOLDER / name).read_text()
    assert committed == crd.render(CRDS[name]), "run python -m kvtier_api.crd"
    assert yaml.safe_load(committed) == CRDS[name]


def test_check_says_when_a_file_is_out_of_date(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert crd.main(["--check", "--folder", str(tmp_path)]) == 1
    assert "out of date: kvtier.io_kvtierpolicies.yaml" in capsys.readouterr().err
    assert crd.main(["--folder", str(tmp_path)]) == 0
    assert crd.main(["--check", "--folder", str(tmp_path)]) == 0


def test_names_of_the_kinds() -> None:
    names = {c["spec"]["names"]["kind"]: c["spec"]["names"] for c in CRDS.values()}
    assert names["KVTierPolicy"]["shortNames"] == ["ktp"]
    assert names["KVTierNode"]["shortNames"] == ["ktn"]
    assert all(n["categories"] == ["kvtier"] for n in names.values())
    assert all(c["spec"]["scope"] == "Cluster" for c in CRDS.values())


def test_every_list_map_and_text_is_bounded() -> None:
    loose = []
    for name, path, node in ALL:
        if path in ("", "apiVersion", "kind", "metadata", "metadata.name"):
            continue
        if node.get("type") == "array" and "maxItems" not in node:
            loose.append((name, path))
        if isinstance(node.get("additionalProperties"), dict) and "maxProperties" not in node:
            loose.append((name, path))
        text = node.get("type") == "string" or node.get("x-kubernetes-int-or-string")
        if text and not {"maxLength", "enum"} & set(node):
            loose.append((name, path))
        if node.get("type") == "integer" and "minimum" not in node and "usedPercent" not in path:
            loose.append((name, path))
    assert loose == []


def test_every_schema_is_structural() -> None:
    forbidden = {"$ref", "anyOf", "oneOf", "allOf", "not", "title", "examples", "const", "kvtier"}
    for name, path, node in ALL:
        assert not forbidden & set(node), (name, path)
        assert node.get("type") or node.get("x-kubernetes-int-or-string"), (name, path)
        if node.get("type") == "array":
            assert node["x-kubernetes-list-type"] in ("set", "map", "atomic"), (name, path)
        for key in node.get("x-kubernetes-list-map-keys", []):
            item = node["items"]
            assert key in item["required"] or "default" in item["properties"][key]


def test_every_field_says_unit_and_default() -> None:
    for name, schema in SCHEMAS.items():
        for path, node in nodes(schema["properties"]["spec"], "spec"):
            if path == "spec" or path.endswith(("[]", "{}")):
                continue
            text = node["description"]
            assert "Unit" in text, (name, path, text)
            assert "efault" in text, (name, path, text)


def test_a_default_in_the_text_is_the_default_of_the_schema() -> None:
    for name, path, node in ALL:
        if "default" in node and "Default: " in node.get("description", ""):
            said = node["description"].rpartition("Default: ")[2].removesuffix(".")
            assert said == crd.default_text(node["default"]), (name, path)


def test_every_rule_says_what_to_write_instead() -> None:
    sentences = {
        rule["message"] for _, _, node in ALL for rule in node.get("x-kubernetes-validations", [])
    }
    assert len(sentences) >= 20
    advice = ("write", "add", "leave", "make", "need", "as ", "is 32")
    assert [s for s in sentences if not any(word in s for word in advice)] == []


def test_status_has_no_defaults_but_lists_and_not_observed() -> None:
    for name, schema in SCHEMAS.items():
        status = schema["properties"]["status"]
        assert status["default"] == {"observedGeneration": -1}
        for path, node in nodes(status):
            assert "default" not in node or path == "" or node["default"] == [], (name, path)


def test_conditions_merge_by_type() -> None:
    for schema in SCHEMAS.values():
        conditions = schema["properties"]["status"]["properties"]["conditions"]
        assert conditions["x-kubernetes-list-type"] == "map"
        assert conditions["x-kubernetes-list-map-keys"] == ["type"]


def test_a_definition_stays_small() -> None:
    """Definitions of hundreds of kilobytes are slow in every client that reads them."""
    for name in CRDS:
        assert (FOLDER / name).stat().st_size < 64 * 1024, name
