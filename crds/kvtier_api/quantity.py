"""Sizes as Kubernetes quantities: ``16Gi``, ``1.5Ti``, ``500G`` or a plain number of bytes.

A ``Quantity`` is the text as the user wrote it (so an object read and written again is unchanged)
that also knows its number of bytes. Two spellings of one size are two different texts with equal
``.bytes``; the revision hash looks at the bytes alone.

Accepted is the part of the Kubernetes grammar that makes sense for a size: no sign, no exponent,
no fractions of a byte (``500m``). The same pattern is sent to the API server as a CEL rule, so
both sides refuse the same texts with the same sentence.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any, Final

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import PydanticCustomError, core_schema

KiB: Final = 1024
MiB: Final = 1024**2
GiB: Final = 1024**3
TiB: Final = 1024**4
PiB: Final = 1024**5

PATTERN: Final = r"^[0-9]{1,19}([.][0-9]{1,6})?(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?$"
MAX_LENGTH: Final = 28
SENTENCE: Final = (
    "not a size: write a number with a unit such as 512Mi, 16Gi, 1.5Ti or 500G "
    "(Ki, Mi, Gi, Ti, Pi are powers of 1024; k, M, G, T, P powers of 1000)"
)

_FACTORS: Final[dict[str, int]] = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "P": 10**15,
    "Ki": KiB,
    "Mi": MiB,
    "Gi": GiB,
    "Ti": TiB,
    "Pi": PiB,
}
_FORM = re.compile(r"([0-9]{1,19}(?:[.][0-9]{1,6})?)(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?", re.ASCII)


def parse_size(text: str) -> int:
    """Bytes of a quantity; a fraction of a byte is rounded up, as Kubernetes does.

    Raises ``ValueError`` with a sentence that says what to write instead.
    """
    return math.ceil(exact_size(text))


def exact_size(text: str) -> Fraction:
    """Bytes of a quantity as written, with the fraction of a byte that 0.3Gi has. What is added or
    compared is this, as on the API server; only what is done with the sum is whole bytes.

    Raises ``ValueError`` with a sentence that says what to write instead.
    """
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is {SENTENCE}")
    return Fraction(match.group(1)) * _FACTORS[match.group(2) or ""]


def is_size(text: str) -> bool:
    return _FORM.fullmatch(text) is not None


def format_size(size: int) -> str:
    """The shortest exact quantity for a number of bytes: 1048576 -> ``1Mi``, 1000 -> ``1000``."""
    for suffix in ("Pi", "Ti", "Gi", "Mi", "Ki"):
        if size and size % _FACTORS[suffix] == 0:
            return f"{size // _FACTORS[suffix]}{suffix}"
    return str(size)


class Quantity(str):
    """A size in bytes, written as a Kubernetes quantity. ``Quantity("1Gi").bytes == 2**30``."""

    __slots__ = ()

    @property
    def bytes(self) -> int:
        return parse_size(self)

    @property
    def exact(self) -> Fraction:
        """Bytes, not rounded."""
        return exact_size(self)

    @classmethod
    def of(cls, size: int) -> Quantity:
        return cls(format_size(size))

    @classmethod
    def _validate(cls, value: Any) -> Quantity:
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            raise PydanticCustomError("int_or_string_type", "must be a string or a whole number")
        text = str(value)
        if len(text) > MAX_LENGTH or not is_size(text):
            raise PydanticCustomError("rule", SENTENCE)
        return cls(text)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._validate,
            serialization=core_schema.plain_serializer_function_ser_schema(
                str, return_schema=core_schema.str_schema()
            ),
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"x-kubernetes-int-or-string": True, "maxLength": MAX_LENGTH}
