"""Sizes and names as people write them in settings, and the figures in messages.

Sizes are Kubernetes quantities, as in a policy (``2Gi``, ``500M``, ``1048576``).
"""

from __future__ import annotations

from typing import Annotated, Any

from kvtier_api.quantity import format_size, parse_size
from pydantic import BeforeValidator, PlainSerializer

__all__ = ["Bytes", "human"]


def _size(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("write a size such as 2Gi")
    if isinstance(value, str):
        return parse_size(value)
    return value


Bytes = Annotated[int, BeforeValidator(_size), PlainSerializer(format_size, return_type=str)]
"""A size in bytes; reads Kubernetes quantities."""


def human(size: int) -> str:
    """A size for a message: exact where it is a round number of its unit, else to one decimal."""
    for unit, factor in (("Ti", 1 << 40), ("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)):
        if size >= factor:
            whole, rest = divmod(size, factor)
            return f"{whole}{unit}" if rest == 0 else f"{size / factor:.1f}{unit}"
    return f"{size}"
