"""What a rule is: its CEL text, its sentence and the same test in Python. The rules: ``rules``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import PydanticCustomError, core_schema


@dataclass(frozen=True, slots=True)
class Rule:
    """A relation inside one object. ``check`` gets the parsed model and is total on it."""

    name: str
    cel: str
    message: str
    check: Callable[[Any], bool]
    field: str | None = None

    def as_validation(self) -> dict[str, Any]:
        """As an entry of ``x-kubernetes-validations``.

        ``fieldPath`` is only given for a field of the object itself that is no list: the API
        server accepts no other.
        """
        out = {"rule": self.cel, "message": self.message}
        if self.field:
            out["fieldPath"] = f".{self.field}"
        return out


@dataclass(frozen=True, slots=True)
class ValueRule:
    """What a scalar's text must look like. Pydantic metadata: ``Annotated[str, RULE]``."""

    name: str
    cel: str
    message: str
    check: Callable[[str], bool]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        def validate(value: str) -> str:
            if not self.check(value):
                raise PydanticCustomError("rule", "{sentence}", {"sentence": self.message})
            return value

        return core_schema.no_info_after_validator_function(validate, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        out = dict(handler(schema))
        out["x-kubernetes-validations"] = [self.as_validation()]
        return out

    def as_validation(self) -> dict[str, Any]:
        return {"rule": self.cel, "message": self.message}


def matches(pattern: str) -> Callable[[str], bool]:
    """The test of an anchored pattern, as ``cel_matches`` makes it."""
    # CEL's matches() searches; every pattern here is anchored. `$` of Python also matches before
    # a final newline, RE2's does not: fullmatch keeps both equal.
    compiled = re.compile(pattern.removeprefix("^").removesuffix("$"), re.ASCII)
    return lambda value: compiled.fullmatch(value) is not None


def cel_matches(pattern: str) -> str:
    """CEL: the text matches."""
    return f"self.matches('{pattern}')"
