"""The base of all API models, and what a field says about itself.

Models are frozen, named in snake_case in Python and in camelCase in YAML. Python code builds them
by Python names; ``Model.read(obj)`` takes an object of the API server or of a file, by YAML names
only.

``knob`` is how a field states description, unit and bounds. The CRD generator and the reference
pages compose their text from it, so that neither default nor bounds are ever typed twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationInfo,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, core_schema

from kvtier_api.rule import Rule

_ACRONYMS = {"hbm": "HBM", "uid": "UID", "id": "ID", "mib": "MiB"}

#: Context key: ``model_validate(.., context={UNRULED: True})`` parses without the object rules,
#: for callers that want to list every violation instead of the first.
UNRULED = "kvtier.unruled"


def camel(name: str) -> str:
    """``ratio_to_hbm`` -> ``ratioToHBM``."""
    first, *rest = name.split("_")
    return first + "".join(_ACRONYMS.get(part, part.capitalize()) for part in rest)


class ApiModel(BaseModel):
    """Frozen; unknown fields are errors; the object's own rules hold on construction."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=camel,
        validate_by_alias=True,
        validate_by_name=True,
        serialize_by_alias=True,
    )

    RULES: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _hold_rules(self, info: ValidationInfo) -> Self:
        if info.context and info.context.get(UNRULED):
            return self
        for _, sentence in self.broken():
            raise PydanticCustomError("rule", "{sentence}", {"sentence": sentence})
        return self

    def broken(self) -> Iterator[tuple[str, str]]:
        """What this object breaks by itself, its sections left aside: (field or "", sentence)."""
        for rule in self.RULES:
            if not rule.check(self):
                yield rule.field or "", rule.message
        for name, field in type(self).model_fields.items():
            about = _extra(field.json_schema_extra).get("kvtier", {})
            if about.get("list_type") in ("set", "map"):
                twin = _twin(getattr(self, name), about["keys"])
                if twin is not None:
                    yield field.alias or name, f"{twin} stands twice: remove one"

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """JSON schema with the rules, and with the computed fields among the properties."""
        out = dict(handler.resolve_ref_schema(handler(schema)))
        properties = dict(out.get("properties", {}))
        for name, field in cls.model_computed_fields.items():
            about = TypeAdapter(field.return_type).json_schema()
            about |= {"description": field.description, **_extra(field.json_schema_extra)}
            properties[field.alias or camel(name)] = about
        out["properties"] = properties
        if cls.RULES:
            out["x-kubernetes-validations"] = [rule.as_validation() for rule in cls.RULES]
        return out

    @classmethod
    def read(cls, obj: object) -> Self:
        """Parse an object of the API server: YAML names, unknown fields ignored, nulls absent.

        Raises ``InvalidObject`` with every problem found. ``validate.unknown_fields`` lists what
        was ignored, for callers that have to say so.
        """
        from kvtier_api.validate import parse

        return parse(cls, obj)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, YAML names, defaults written out, absent fields left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def _extra(extra: object) -> dict[str, Any]:
    return dict(extra) if isinstance(extra, dict) else {}


def _twin(items: tuple[Any, ...], keys: list[str]) -> str | None:
    """The first item of a set, or key of a list merged by key, that stands there again."""
    seen: set[object] = set()
    for item in items:
        key = tuple(getattr(item, k) for k in keys) if keys else item
        if key in seen:
            return "/".join(map(str, key)) if keys else str(item)
        seen.add(key)
    return None


ListType = Literal["atomic", "set", "map"]


def knob(
    text: str,
    *,
    unit: str | None = None,
    absent: str | None = None,
    list_type: ListType | None = None,
    keys: tuple[str, ...] = (),
    **bounds: Any,
) -> FieldInfo:
    """Metadata of one field.

    ``text`` ends with a full stop. ``unit``: what the number counts. ``absent``: what holds when
    an optional field is left out. ``list_type``/``keys``: merge behaviour of a list. ``bounds``
    are pydantic's (ge, le, min_length, max_length, pattern, ...).
    """
    extra: dict[str, Any] = {"unit": unit, "absent": absent}
    if list_type:
        extra["list_type"] = list_type
        extra["keys"] = list(keys)
    info: FieldInfo = Field(description=text, json_schema_extra={"kvtier": extra}, **bounds)
    return info


def number(text: str, *, unit: str, ge: int, le: int, absent: str | None = None) -> FieldInfo:
    """A whole number; text, booleans and fractions are refused, as the API server does."""
    return knob(text, unit=unit, absent=absent, ge=ge, le=le, strict=True)
