"""JSON as kubectl reads it: one object after another in one text, without anything between them."""

from __future__ import annotations

import json
import re
from typing import Any, Final

__all__ = ["pieces"]

_SPACE: Final = re.compile(r"[ \t\r\n]*")


def pieces(text: str) -> list[tuple[Any, int, int]] | None:
    """The objects of a text with where each begins and ends; None where the text is no JSON.

    Only a text that begins with ``{`` can be: everything else is for a YAML reader, and so is a
    text in which an object is not JSON after all (``{a: 1}``).
    """
    position = _SPACE.match(text).end()  # type: ignore[union-attr]
    if not text.startswith("{", position):
        return None
    found = []
    while position < len(text):
        try:
            obj, end = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError):
            return None
        if not isinstance(obj, dict):
            return None
        found.append((obj, position, end))
        position = _SPACE.match(text, end).end()  # type: ignore[union-attr]
    return found


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_DECODER: Final = json.JSONDecoder(parse_constant=_no_number)
