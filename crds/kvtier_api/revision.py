"""The revision hash: what makes two policies the same as far as an agent is concerned.

SHA-256, hex, over canonical JSON of the behaviour sections with every field removed that equals
its default. So a later version may add a field with a default and no existing policy gets a new
hash: upgrading the CRD starts no rollout. Canonical means:

- keys sorted, no white space, UTF-8;
- sizes as numbers of bytes (``1Gi`` and ``1024Mi`` are one size);
- lists whose order means nothing (sets, and lists merged by key) sorted;
- a section that is all default is removed like a field.

``nodeSelector``, ``priority`` and ``rollout`` are control input and not part of it.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from typing import Any, Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from kvtier_api.model import ApiModel
from kvtier_api.policy import RevisionSpec
from kvtier_api.quantity import Quantity

SHORT: Final = 10
_MISSING: Final = object()


def revision_hash(spec: RevisionSpec) -> str:
    """64 hexadecimal digits that name the behaviour of ``spec``.

    A ``PolicySpec`` is a ``RevisionSpec``; only its behaviour sections count.
    """
    text = json.dumps(canonical(spec), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def revision_name(policy: str, revision: str) -> str:
    """Name of the ControllerRevision: ``<policy>-<first 10 digits>``."""
    return f"{policy}-{revision[:SHORT]}"


def canonical(spec: RevisionSpec) -> dict[str, Any]:
    """What is hashed: the behaviour sections, defaults removed."""
    return _section(spec, RevisionSpec)


def _section(model: BaseModel, as_type: type[BaseModel]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, field in as_type.model_fields.items():
        value = _value(getattr(model, name), field)
        if value != _default(as_type, name):
            out[field.alias or name] = value
    return out


@cache
def _default(model: type[BaseModel], name: str) -> Any:
    field = model.model_fields[name]
    default = field.get_default(call_default_factory=True)
    return _MISSING if default is PydanticUndefined else _value(default, field)


def _value(value: Any, field: FieldInfo | None = None) -> Any:
    if isinstance(value, Quantity):
        return value.bytes
    if isinstance(value, ApiModel):
        return _section(value, type(value))
    if isinstance(value, tuple):
        items = [_value(item) for item in value]
        return items if field is None or not _unordered(field) else sorted(items, key=_order)
    if isinstance(value, dict):
        return {key: _value(item) for key, item in value.items()}
    return value


def _order(item: Any) -> str:
    return json.dumps(item, sort_keys=True)


def _unordered(field: FieldInfo) -> bool:
    extra = field.json_schema_extra
    about = extra.get("kvtier") if isinstance(extra, dict) else None
    return isinstance(about, dict) and about.get("list_type") in ("set", "map")
