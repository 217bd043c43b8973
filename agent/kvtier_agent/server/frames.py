"""The raw buffers of a message, and the versions two sides have in common."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.identity import KEY_BYTES


class MalformedError(ValueError):
    """A message that breaks the rules of ``protocol``."""


def keys_of(buffer: bytes | memoryview, most: int) -> NDArray[np.uint8]:
    """The key buffer as (n, 16) uint8; raises ``MalformedError`` on a cut or oversized one."""
    if len(buffer) % KEY_BYTES:
        raise MalformedError(f"key buffer of {len(buffer)} bytes is no multiple of {KEY_BYTES}")
    if len(buffer) > most * KEY_BYTES:
        raise MalformedError(f"{len(buffer) // KEY_BYTES} keys in one call, at most {most}")
    return np.frombuffer(buffer, np.uint8).reshape(-1, KEY_BYTES)


def column(buffer: bytes | memoryview, dtype: str, n: int) -> NDArray[Any]:
    """One column of ``n`` values; raises ``MalformedError`` when the length is another."""
    kind = np.dtype(dtype)
    if len(buffer) != n * kind.itemsize:
        raise MalformedError(f"column of {len(buffer)} bytes where {n * kind.itemsize} belong")
    return np.frombuffer(buffer, kind)


def common_version(ours: tuple[int, int], theirs: tuple[int, int]) -> int | None:
    """The highest protocol version that both (oldest, newest) ranges contain, or None."""
    highest = min(ours[1], theirs[1])
    return highest if highest >= max(ours[0], theirs[0]) else None


def request_id(header: bytes | memoryview) -> int:
    """The id in a header that does not decode, where one can be found, else 0."""
    try:
        raw = msgspec.msgpack.decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return 0
    if isinstance(raw, list) and len(raw) > 1 and isinstance(raw[1], int):
        return raw[1] if 0 <= raw[1] < 1 << 63 else 0
    return 0
