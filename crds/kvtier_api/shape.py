"""An object held against a model, field by field, before its values are looked at.

The API server does three things to an object that a schema validator does not: it refuses fields
that are not declared, replaces a null by the field's default or refuses it, and takes 2.0 for a
whole number. The walks here do the same over plain dicts and lists.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from kvtier_api.meta import ObjectMeta, OwnerReference


def prune(kind: type[BaseModel], obj: object) -> object:
    """``obj`` without nulls and unknown fields, and 2.0 for a whole number as 2.

    That is what the API server does to an object before its schema looks at it.
    """
    if not isinstance(obj, Mapping):
        return obj
    known = {field.alias or name: field.annotation for name, field in kind.model_fields.items()}
    return {
        key: _prune_value(known[key], value)
        for key, value in obj.items()
        if key in known and value is not None
    }


def _prune_value(annotation: Any, value: Any) -> Any:
    model, is_list = model_in(annotation)
    if model is not None and is_list and isinstance(value, list):
        return [prune(model, item) for item in value]
    if model is not None and not is_list:
        return prune(model, value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: item for key, item in value.items() if item is not None}
    return value


def model_in(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The model that a field holds, and whether it holds a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    origin = get_origin(annotation)
    if origin is Annotated:
        return model_in(get_args(annotation)[0])
    if origin is tuple:
        return model_in(get_args(annotation)[0])[0], True
    if origin in (Union, UnionType):
        for arm in get_args(annotation):
            found = model_in(arm)
            if found[0] is not None:
                return found
    return None, False


def unknown_fields(kind: type[BaseModel], obj: object) -> list[str]:
    """Paths of the fields that ``kind`` does not know."""
    return [path for path, _, _ in unknown(kind, obj, "")]


def unknown(kind: type[BaseModel], obj: object, path: str) -> Iterator[tuple[str, str, list[str]]]:
    if not isinstance(obj, Mapping) or kind in (ObjectMeta, OwnerReference):
        return
    known = {field.alias or name: field.annotation for name, field in kind.model_fields.items()}
    known |= {field.alias or name: None for name, field in kind.model_computed_fields.items()}
    for key, value in obj.items():
        here = join(path, str(key))
        if key not in known:
            yield here, str(key), list(known)
            continue
        model, is_list = model_in(known[key])
        if model is None:
            continue
        if is_list:
            for index, item in enumerate(value if isinstance(value, list) else ()):
                yield from unknown(model, item, f"{here}[{index}]")
        else:
            yield from unknown(model, value, here)


def empty(kind: type[BaseModel], obj: object, path: str) -> Iterator[str]:
    """Paths that are written but null where no default takes their place."""
    if not isinstance(obj, Mapping) or kind is ObjectMeta:
        return
    for name, field in kind.model_fields.items():
        key = field.alias or name
        value, here = obj.get(key), join(path, key)
        if value is None:
            if key in obj and field.default is None:
                yield here
            continue
        model, is_list = model_in(field.annotation)
        if model is None:
            if isinstance(value, Mapping):
                yield from (join(here, str(k)) for k, item in value.items() if item is None)
        elif not is_list:
            yield from empty(model, value, here)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                yield from empty(model, item, f"{here}[{index}]")


def nearest(name: str, known: list[str]) -> str | None:
    by_lower = {k.lower(): k for k in known}
    plain = name.lower().replace("_", "").replace("-", "")
    found = difflib.get_close_matches(plain, by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
