"""Problems of an object, with the path a user knows and a sentence that says what to write.

``validate`` answers for a whole ``KVTierPolicy`` or ``KVTierNode`` as the API server would under
strict field validation: unknown fields first (with the nearest known name), then the schema, then
the rules. ``parse`` is the lenient way in for objects that the API server has already admitted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kvtier_api import object_meta
from kvtier_api.meta import API_VERSION
from kvtier_api.model import UNRULED, ApiModel
from kvtier_api.node import KVTierNode
from kvtier_api.policy import KVTierPolicy
from kvtier_api.shape import empty, join, model_in, nearest, prune, unknown, unknown_fields

__all__ = [
    "KINDS",
    "MAX_BYTES",
    "InvalidObject",
    "Problem",
    "broken_rules",
    "parse",
    "unknown_fields",
    "validate",
]

M = TypeVar("M", bound=ApiModel)
Kind = type[KVTierPolicy] | type[KVTierNode]
KINDS: Final[dict[str, Kind]] = {"KVTierPolicy": KVTierPolicy, "KVTierNode": KVTierNode}

MAX_BYTES: Final = 1_572_864
"""The most that an API server stores as one object, as JSON (etcd's bound of a request)."""
_EMPTY: Final = "is empty: write a value, or leave it out"


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One fault. ``path`` as kubectl writes it: ``spec.tiers.nvme.volumes[0]``; "" = the whole."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class InvalidObject(ValueError):
    """An object breaks its schema or a rule."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = tuple(problems)


def validate(obj: object) -> list[Problem]:
    """Every problem of one object as it stands in a file; empty when it is valid."""
    if not isinstance(obj, Mapping):
        return [Problem("", "not a Kubernetes object: write apiVersion, kind, metadata and spec")]
    kind, problems = _kind(obj)
    if kind is None:
        return problems
    problems = [Problem(*found) for found in object_meta.problems(obj.get("metadata"))]
    problems += _unknown_problems(kind, obj)
    problems += [Problem(path, _EMPTY) for path in empty(kind, obj, "")]
    problems += _read(kind, prune(kind, obj))[1]
    if (size := _size(obj)) > MAX_BYTES:
        problems.append(Problem("", f"{size} bytes: an API server takes {MAX_BYTES} an object"))
    return list(dict.fromkeys(problems))


def _size(obj: object) -> int:
    text = json.dumps(obj, ensure_ascii=False, separators=(",", ":"), default=str)
    return len(text.encode(errors="surrogatepass"))


def parse(kind: type[M], obj: object) -> M:
    """Parse an object by its YAML names; unknown fields and nulls are dropped.

    Raises ``InvalidObject`` with every problem.
    """
    model, problems = _read(kind, prune(kind, obj))
    if model is None or problems:
        raise InvalidObject(problems)
    return model


def _read(kind: type[M], pruned: object) -> tuple[M | None, list[Problem]]:
    try:
        model = _model(kind, pruned)
    except ValidationError as error:
        problems = [_from_pydantic(e) for e in error.errors()]
        # A list that lost its bad items counts as short as well; one problem is enough.
        short = {p for p in problems if any(o.path.startswith(f"{p.path}[") for o in problems)}
        return None, [p for p in problems if p not in short] + list(_sound_parts(kind, pruned, ""))
    return model, list(broken_rules(model))


def _model(kind: type[M], pruned: object) -> M:
    return kind.model_validate(pruned, by_alias=True, by_name=False, context={UNRULED: True})


def _sound_parts(kind: type[BaseModel], pruned: object, path: str) -> Iterator[Problem]:
    """Broken rules in those sections that can be read although the whole cannot."""
    if not isinstance(pruned, Mapping) or not issubclass(kind, ApiModel):
        return
    for name, field in kind.model_fields.items():
        part, is_list = model_in(field.annotation)
        key = field.alias or name
        if part is None or not issubclass(part, ApiModel) or key not in pruned:
            continue
        value, here = pruned[key], join(path, key)
        whole = enumerate(value) if is_list and isinstance(value, list) else [(None, value)]
        for index, item in whole:
            at = here if index is None else f"{here}[{index}]"
            try:
                model = _model(part, item)
            except ValidationError:
                yield from _sound_parts(part, item, at)
            else:
                yield from broken_rules(model, at)


def broken_rules(model: ApiModel, path: str = "") -> Iterator[Problem]:
    """Rules that a parsed object breaks, its sections included."""
    for at, sentence in model.broken():
        yield Problem(join(path, at) if at else path, sentence)
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        here = join(path, field.alias or name)
        if isinstance(value, ApiModel):
            yield from broken_rules(value, here)
        elif isinstance(value, tuple):
            for index, item in enumerate(value):
                if isinstance(item, ApiModel):
                    yield from broken_rules(item, f"{here}[{index}]")


def _unknown_problems(kind: type[BaseModel], obj: object) -> Iterator[Problem]:
    for path, name, known in unknown(kind, obj, ""):
        near = nearest(name, known)
        hint = f"did you mean {near}?" if near else f"known here: {', '.join(sorted(known))}"
        yield Problem(path, f"unknown field, {hint}")


def _kind(obj: Mapping[str, Any]) -> tuple[Kind | None, list[Problem]]:
    problems = []
    if obj.get("apiVersion") != API_VERSION:
        problems.append(Problem("apiVersion", f"write apiVersion: {API_VERSION}"))
    kind = KINDS.get(obj["kind"]) if isinstance(obj.get("kind"), str) else None
    if kind is None:
        problems.append(Problem("kind", f"write kind: {' or kind: '.join(KINDS)}"))
    return (None if problems else kind), problems


def _from_pydantic(error: ErrorDetails) -> Problem:
    path = ""
    for part in error["loc"]:
        path = f"{path}[{part}]" if isinstance(part, int) else join(path, str(part))
    if path.endswith(".[key]"):
        path = path.removesuffix(".[key]")
    return Problem(path, _sentence(error))


def _sentence(error: ErrorDetails) -> str:
    ctx = error.get("ctx", {})
    match error["type"]:
        case "missing":
            return "required: write a value"
        case "int_type" | "int_from_float":
            return "must be a whole number"
        case "string_type":
            return "must be text: put it into quotes"
        case "bool_type":
            return "must be true or false"
        case "tuple_type":
            return "must be a list"
        case "dict_type" | "model_type" | "model_attributes_type":
            return "must be a section of its own (key: value)"
        case "greater_than_equal":
            return f"must be at least {ctx['ge']}"
        case "less_than_equal":
            return f"must be at most {ctx['le']}"
        case "literal_error":
            names = ctx["expected"].replace("'", "").replace(" or ", ", ")
            return f"write one of {names}" if "," in names else f"write {names}"
        case "too_long":
            return f"at most {ctx['max_length']} entries, not {ctx['actual_length']}"
        case "too_short":
            return f"must have at least {ctx['min_length']} entry"
        case "string_too_long":
            return f"at most {ctx['max_length']} characters"
        case "string_too_short":
            return "must not be empty"
        case "string_pattern_mismatch":
            return f"must look like {ctx['pattern']}"
        case _:
            return error["msg"]
