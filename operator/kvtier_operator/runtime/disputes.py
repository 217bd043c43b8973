"""Writes that somebody undoes, and how often they are repeated.

Two operators with different settings (two releases, an upgrade by hand) each find the other's spec
wrong and write their own, as fast as the API server takes it. Nobody can win; what can be done is
to bound the harm and to say so. A write of the same content as the last one to the same object has
been undone in between. A few are repeated at once, because people's hands do that; after that the
delay doubles up to a write a minute.

Pure: ``now`` is monotonic seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

__all__ = ["Disputes"]

Key = TypeVar("Key")

AT_ONCE: Final = 3
"""Repetitions without delay."""
FIRST_SECONDS: Final = 1.0
LONGEST_SECONDS: Final = 60.0
FORGOTTEN_SECONDS: Final = 300.0
"""A write that stood for so long was not undone, whatever comes later."""


@dataclass(frozen=True, slots=True)
class _Last:
    content: str
    at: float
    repeated: int = 0


class Disputes(Generic[Key]):
    """What was last written for each key, and how often in a row."""

    def __init__(self) -> None:
        self._last: dict[Key, _Last] = {}

    def wait(self, key: Key, content: Mapping[str, object], now: float) -> float:
        """Seconds until ``content`` may be written for ``key``; 0: now."""
        last = self._same(key, _text(content), now)
        if last is None or last.repeated < AT_ONCE:
            return 0.0
        delay = min(LONGEST_SECONDS, FIRST_SECONDS * 2.0 ** min(last.repeated - AT_ONCE, 30))
        return max(0.0, last.at + delay - now)

    def wrote(self, key: Key, content: Mapping[str, object], now: float) -> bool:
        """The write was taken. True where it is time to tell somebody: once for each dispute."""
        text = _text(content)
        last = self._same(key, text, now)
        repeated = 0 if last is None else last.repeated + 1
        self._last[key] = _Last(text, now, repeated)
        return repeated == AT_ONCE

    def forget(self, key: Key) -> None:
        """The object is gone."""
        self._last.pop(key, None)

    def _same(self, key: Key, text: str, now: float) -> _Last | None:
        last = self._last.get(key)
        if last is None or last.content != text or now - last.at > FORGOTTEN_SECONDS:
            return None
        return last


def _text(content: Mapping[str, object]) -> str:
    """Canonical, without the times that each writer has of its own."""

    def timeless(value: object) -> object:
        if isinstance(value, Mapping):
            return {k: timeless(v) for k, v in value.items() if k != "lastTransitionTime"}
        if isinstance(value, list | tuple):
            return [timeless(v) for v in value]
        return value

    return json.dumps(timeless(content), sort_keys=True)
