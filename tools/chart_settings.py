"""The settings of both programs in the chart's ``values.schema.json``: name, type and bounds.

``agentSettings`` and ``operatorSettings`` under ``definitions`` are written from the settings
classes, so that helm refuses a setting that no program has, or a value out of its bounds. The rest
of the schema is written by hand and stays as it is. A schema cannot compare sizes such as ``64Gi``:
their bounds lie in ``files/sizes.json``, which the chart's templates read.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvtier_agent.settings import AgentSettings
from kvtier_api.quantity import format_size
from kvtier_operator.settings import OperatorSettings
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

CHART: Final = Path(__file__).resolve().parent.parent / "charts/kvtier"
PATH: Final = CHART / "values.schema.json"
SIZES: Final = CHART / "files/sizes.json"
Schema = dict[str, Any]

#: Settings that the chart makes from values of its own. The schema lets them through, and the
#: template refuses them with a sentence that says so; their lists in the templates are tested.
OF_THE_CHART: Final[Mapping[type[BaseSettings], frozenset[str]]] = {
    AgentSettings: frozenset(
        {"http", "run_dir", "shm_dir", "state_dir", "l0", "device", "volume", "domain"}
        | {"node_name", "policy", "kubeconfig"}
    ),
    OperatorSettings: frozenset({"namespace", "http", "kubeconfig"}),
}
DEFINITIONS: Final[Mapping[str, type[BaseSettings]]] = {
    "agentSettings": AgentSettings,
    "operatorSettings": OperatorSettings,
}
_BOUNDS: Final = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum"}
_QUANTITY: Final = r"^[0-9]+(\.[0-9]+)?(k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"


def text(current: str) -> str:
    """The schema with both definitions written anew."""
    schema = json.loads(current)
    for name, settings in DEFINITIONS.items():
        schema["definitions"][name] = definition(settings)
    return json.dumps(schema, indent=2) + "\n"


def definition(settings: type[BaseSettings]) -> Schema:
    """Names, types and bounds of one program's settings as JSON schema."""
    return {
        "type": ["object", "null"],
        "description": "written by tools/chart_settings.py: change the settings class instead",
        "additionalProperties": False,
        "properties": {
            name: {"description": "set by the chart from a value of its own"}
            if name in OF_THE_CHART[settings]
            else _value(field)
            for name, field in settings.model_fields.items()
        },
    }


def sizes() -> str:
    """Bounds of every setting that is a size, in bytes and as people write them, as JSON."""
    found = {
        name.removesuffix("Settings"): {
            setting: {
                word: {"bytes": value, "text": format_size(value)}
                for word, value in _bounds(field).items()
            }
            for setting, field in settings.model_fields.items()
            if _is_size(field)
        }
        for name, settings in DEFINITIONS.items()
    }
    return json.dumps(found, indent=2) + "\n"


def _bounds(field: FieldInfo) -> dict[str, Any]:
    return {
        word: getattr(bound, attribute)
        for bound in field.metadata
        for attribute, word in _BOUNDS.items()
        if getattr(bound, attribute, None) is not None
    }


def _is_size(field: FieldInfo) -> bool:
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    return str(extra.get("unit", "")).startswith("quantity")


def _value(field: FieldInfo) -> Schema:
    bounds = _bounds(field)
    if _is_size(field):
        return {"anyOf": [{"type": "integer", **bounds}, {"type": "string", "pattern": _QUANTITY}]}
    if typing.get_origin(field.annotation) is typing.Literal:
        return {"enum": list(typing.get_args(field.annotation))}
    kinds: dict[Any, str] = {bool: "boolean", int: "integer", float: "number"}
    if field.annotation not in kinds:
        raise TypeError(f"no JSON schema is known for {field.annotation}: add one here")
    return {"type": kinds[field.annotation], **bounds}


def is_current() -> bool:
    """Whether what is committed is that of the settings classes."""
    current = PATH.read_text(encoding="utf-8")
    return current == text(current) and SIZES.exists() and SIZES.read_text() == sizes()


def write() -> None:
    PATH.write_text(text(PATH.read_text(encoding="utf-8")), encoding="utf-8")
    SIZES.write_text(sizes(), encoding="utf-8")
