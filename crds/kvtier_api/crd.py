"""From the models to the CustomResourceDefinitions: ``python -m kvtier_api.crd [--check]``.

The models' JSON schema is close to what the API server wants, and differs in these points, each
handled in ``_structural``:

- references are inlined, keeping description and default that stand beside them;
- ``X | None`` becomes plain X: an absent field, never a null;
- a default model is written out in full, because the API server validates defaults with the CEL
  rules of the object;
- the keys of a map cannot have a schema: their rule moves to the map;
- every description ends with unit, range and default, so that ``kubectl explain`` tells them;
- below ``status`` only lists have defaults: an applied status must hold what its writer said.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvtier_api.meta import GROUP, VERSION
from kvtier_api.model import ApiModel
from kvtier_api.node import KVTierNode
from kvtier_api.policy import KVTierPolicy
from kvtier_api.rules import LABEL_KEY, SIZE

Json = dict[str, Any]
FOLDER: Final = Path(__file__).resolve().parent.parent
INT32: Final = 2**31 - 1
INT64: Final = 2**63 - 1

_ROOT: Final[Json] = {
    "apiVersion": {"type": "string", "description": f"Version of this form: {GROUP}/{VERSION}."},
    "kind": {"type": "string", "description": "Name of this form."},
    "metadata": {"type": "object", "properties": {"name": {"type": "string"}}},
}
_KEPT: Final = (
    "type",
    "format",
    "enum",
    "pattern",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "required",
    "x-kubernetes-int-or-string",
    "x-kubernetes-validations",
)


def _column(name: str, path: str, kind: str = "string", **more: Any) -> Json:
    return {"name": name, "type": kind, "jsonPath": path, **more}


def _condition(type_: str, field: str) -> str:
    return f'.status.conditions[?(@.type=="{type_}")].{field}'


def _tier(name: str) -> str:
    return f'.status.tiers[?(@.name=="{name}")].usedPercent'


_AGE: Final = _column("Age", ".metadata.creationTimestamp", "date")
_KINDS: Final[tuple[tuple[type[ApiModel], str, str, list[Json]], ...]] = (
    (
        KVTierPolicy,
        "kvtierpolicies",
        "ktp",
        [
            _column("Ready", _condition("Ready", "status")),
            _column("Reason", _condition("Ready", "reason")),
            _column("Revision", ".status.shortRevision"),
            _column("Nodes", ".status.nodes.summary", description="Ready of selected nodes."),
            _column("Priority", ".spec.priority", "integer", priority=1),
            _AGE,
        ],
    ),
    (
        KVTierNode,
        "kvtiernodes",
        "ktn",
        [
            _column("Policy", ".spec.policy.name"),
            _column("Revision", ".status.shortRevision"),
            _column("Ready", _condition("Ready", "status")),
            _column("Reason", _condition("Ready", "reason"), priority=1),
            _column("L0%", _tier("hbm"), "integer", description="Share of L0 in use."),
            _column("L1%", _tier("dram"), "integer", description="Share of L1 in use."),
            _column("L2%", _tier("nvme"), "integer", description="Share of L2 in use."),
            _AGE,
        ],
    ),
)


def crds() -> dict[str, Json]:
    """File name -> CustomResourceDefinition."""
    return {f"{GROUP}_{plural}.yaml": _crd(*kind) for kind in _KINDS for plural in (kind[1],)}


def _crd(model: type[ApiModel], plural: str, short: str, columns: list[Json]) -> Json:
    kind = model.__name__
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": [short],
                "categories": ["kvtier"],
            },
            "scope": "Cluster",
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema(model)},
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": columns,
                }
            ],
        },
    }


def schema(model: type[ApiModel]) -> Json:
    """Structural schema of a kind."""
    full = model.model_json_schema(by_alias=True, mode="validation")
    definitions = full.get("$defs", {})
    root = _structural(full, definitions, defaults=True)
    properties = root["properties"]
    status = _structural(full["properties"]["status"], definitions, defaults=False)
    properties["spec"]["description"] = model.model_fields["spec"].description
    properties |= _ROOT
    status |= {
        "description": model.model_fields["status"].description,
        "default": {"observedGeneration": -1},
    }
    properties["status"] = status
    root["required"] = [name for name in root.get("required", []) if name != "metadata"]
    if not root["required"]:
        del root["required"]
    return root


def _structural(node: Json, definitions: Json, *, defaults: bool) -> Json:
    node = _resolve(node, definitions)
    out: Json = {key: node[key] for key in _KEPT if key in node}
    if node.get("x-kubernetes-int-or-string"):
        out["x-kubernetes-validations"] = [SIZE.as_validation()]
    if "const" in node:
        out |= {"type": "string", "enum": [node["const"]]}
    if out.get("type") == "integer":
        _integer(out)
    if text := _description(node):
        out["description"] = text
    if "properties" in node:
        out["properties"] = {
            name: _structural(child, definitions, defaults=defaults)
            for name, child in node["properties"].items()
        }
    elif out.get("type") == "object":
        _map(out, node, definitions)
    if out.get("type") == "array":
        out["items"] = _structural(node["items"], definitions, defaults=defaults)
        about = node.get("kvtier", {})
        out["x-kubernetes-list-type"] = about.get("list_type", "atomic")
        if about.get("keys"):
            out["x-kubernetes-list-map-keys"] = about["keys"]
    if node.get("default") is not None and (defaults or out.get("type") == "array"):
        out["default"] = _without_nulls(node["default"])
    return dict(sorted(out.items(), key=lambda item: _ORDER.get(item[0], 50)))


_ORDER: Final = {"description": 0, "type": 1, "default": 2, "required": 80, "properties": 90}


def _resolve(node: Json, definitions: Json) -> Json:
    """Without ``$ref`` and without the null arm; what stands beside wins over what is inside."""
    outer = {key: value for key, value in node.items() if key not in ("$ref", "anyOf", "allOf")}
    if "$ref" in node:
        inner = _resolve(definitions[node["$ref"].rpartition("/")[2]], definitions)
        return {**inner, **outer}
    if "anyOf" in node:
        arms = [arm for arm in node["anyOf"] if arm.get("type") != "null"]
        if len(arms) != 1:
            raise ValueError(f"a union of {len(arms)} types has no structural schema: {node}")
        return {**_resolve(arms[0], definitions), **outer}
    return node


def _integer(out: Json) -> None:
    wide = max(abs(out.get("minimum", 0)), abs(out.get("maximum", INT32))) > INT32
    out["format"] = "int64" if wide else "int32"
    if out.get("maximum") == INT64:
        del out["maximum"]  # the format says it, and a float cannot


def _map(out: Json, node: Json, definitions: Json) -> None:
    values = node.get("additionalProperties")
    if not isinstance(values, dict):
        raise ValueError(f"an object needs properties or typed values: {node}")
    out["additionalProperties"] = _structural(values, definitions, defaults=False)
    # The only map in the API is keyed by label keys; their rule is put on the map.
    rule = LABEL_KEY.cel.replace("self", "key", 1)
    out["x-kubernetes-validations"] = [
        {"rule": f"self.all(key, {rule})", "message": LABEL_KEY.message}
    ]


def _description(node: Json) -> str:
    text = " ".join(str(node.get("description", "")).split())
    about = node.get("kvtier")
    if about is None:
        return text
    unit = about.get("unit")
    parts = [text]
    if unit:
        parts.append("Units: those of its fields." if unit == "section" else f"Unit: {unit}.")
    if span := _range(node):
        parts.append(span)
    parts.append(_default_text(node, about))
    return " ".join(part for part in parts if part)


def _range(node: Json) -> str:
    low, high = node.get("minimum"), node.get("maximum")
    if node.get("type") != "integer" or low is None or high in (None, INT64):
        return ""
    return f"Range: {low} to {high}."


def _default_text(node: Json, about: Json) -> str:
    if about.get("absent"):
        return f"No default; when absent: {about['absent']}."
    if "default" not in node:
        return "Required, no default." if about.get("unit") else ""
    return f"Default: {default_text(node['default'])}."


def default_text(value: Any) -> str:
    """A default as a user would write it in YAML."""
    value = _without_nulls(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if value in ([], {}, ""):
        return "empty"
    if isinstance(value, dict):
        inner = ", ".join(f"{key}: {_flow(item)}" for key, item in value.items())
        return f"{{{inner}}}"
    return str(value)


def _flow(value: Any) -> str:
    if value == {}:
        return "{}"
    if value == []:
        return "[]"
    return default_text(value)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def render(crd: Json) -> str:
    """The YAML that is committed."""
    import yaml

    text = yaml.safe_dump(crd, sort_keys=False, width=96, allow_unicode=True)
    return f"# Generated by python -m kvtier_api.crd from the models; do not edit.\n{text}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvtier_api.crd", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether files are current")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the files are")
    options = parser.parse_args(arguments)
    stale = []
    for name, crd in crds().items():
        path, text = options.folder / name, render(crd)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not options.check:
                path.write_text(text, encoding="utf-8")
    if options.check and stale:
        print(f"out of date: {', '.join(stale)}; run python -m kvtier_api.crd", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
