"""What callers of ``Client`` may say: checked here, before anything is asked of the agent.

Engines compute with numpy and torch, so any number of their types will do. A value out of bounds is
the caller's mistake: ``ValueError``, one line that says what to give. Pure.
"""

from __future__ import annotations

import math
import operator
import re
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.identity import KEY_BYTES
from kvtier_agent.server import protocol as p

LEAST_TIMEOUT_SECONDS: Final = 0.001
MOST_TIMEOUT_SECONDS: Final = 3600.0
MOST_TOKENS: Final = 1 << 31
MOST_MILLISECONDS: Final = 1 << 31
MOST_NUMBER: Final = (1 << 63) - 1
NAME_CHARACTERS: Final = 256
NAME_BYTES: Final = 1000
"""In UTF-8: four names and the numbers of a ``Hello`` fit into one header."""

_TENANT: Final = re.compile("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
WHAT_KEYS_ARE: Final = (
    "give (n, 16) uint8, bytes of a multiple of 16, or a list of 16 bytes each"
    " (other integers: .view(np.uint8))"
)


def as_keys(keys: Any) -> NDArray[np.uint8]:
    """Keys as a contiguous (n, 16) uint8 array.

    Takes a uint8 array or tensor of shape (n, 16) or (16 n,), anything bytes-like of a multiple of
    16 bytes, or an iterable of bytes-likes of 16 each. Nothing is converted: a key of another type
    would be cut to the name of another page.
    """
    if hasattr(keys, "detach"):
        keys = keys.detach().cpu().numpy()
    if isinstance(keys, np.ndarray):
        flat = keys.ndim == 1 and keys.size % KEY_BYTES == 0
        if keys.dtype != np.uint8 or not (flat or keys.shape[1:] == (KEY_BYTES,)):
            raise ValueError(f"keys of shape {keys.shape} {keys.dtype}: {WHAT_KEYS_ARE}")
        return np.ascontiguousarray(keys).reshape(-1, KEY_BYTES)
    buffer = keys if isinstance(keys, bytes | bytearray | memoryview) else _joined(keys)
    if memoryview(buffer).nbytes % KEY_BYTES:
        size = memoryview(buffer).nbytes
        raise ValueError(f"{size} bytes of keys are no multiple of 16: {WHAT_KEYS_ARE}")
    return np.frombuffer(buffer, np.uint8).reshape(-1, KEY_BYTES)


def _joined(keys: Any) -> bytes:
    try:
        names = list(keys)
        joined = b"".join(names)
        right = all(len(name) == KEY_BYTES for name in names)
    except (TypeError, BufferError):
        raise ValueError(f"keys of type {type(keys).__name__}: {WHAT_KEYS_ARE}") from None
    if not right or len(joined) != KEY_BYTES * len(names):
        raise ValueError(f"keys that are not 16 bytes each: {WHAT_KEYS_ARE}")
    return joined


def whole(name: str, value: Any, most: int, least: int = 0) -> int:
    """``value`` as an int from ``least`` to ``most``."""
    try:
        number = operator.index(value)
    except TypeError:
        real = _real(value)
        number = int(real) if real.is_integer() else least - 1
    if not least <= number <= most:
        raise ValueError(f"{name} is {value!r}; give a whole number from {least} to {most}")
    return number


def tokens(name: str, value: Any) -> int:
    """A number of tokens."""
    return whole(name, value, MOST_TOKENS)


def milliseconds(name: str, value: Any) -> int:
    """A time in whole milliseconds, rounded up."""
    real = _real(value)
    if not 0 <= real <= MOST_MILLISECONDS:
        raise ValueError(f"{name} is {value!r}; give milliseconds from 0 to {MOST_MILLISECONDS}")
    return math.ceil(real)


def rate(name: str, value: Any) -> float:
    """A speed in tokens per second."""
    real = _real(value)
    if not p.LEAST_RATE <= real <= p.MOST_RATE:
        raise ValueError(
            f"{name} is {value!r}; give tokens per second from {p.LEAST_RATE:g} to {p.MOST_RATE:g}"
        )
    return real


def tenant(value: Any) -> str:
    """A tenant's name; "" for none."""
    if not isinstance(value, str) or (value and not _TENANT.fullmatch(value)):
        raise ValueError(
            f"tenant is {value!r}; give up to 63 lower-case letters, digits and -, such as search"
        )
    return value


def timeout(value: Any) -> float:
    """``timeout_seconds`` of a client."""
    real = _real(value)
    if not LEAST_TIMEOUT_SECONDS <= real <= MOST_TIMEOUT_SECONDS:
        raise ValueError(
            f"timeout_seconds is {value!r}; give seconds from {LEAST_TIMEOUT_SECONDS:g} to"
            f" {MOST_TIMEOUT_SECONDS:g}"
        )
    return real


def parent_key(value: Any) -> bytes:
    """The key of a page, 16 bytes; empty where none is given."""
    try:
        key = memoryview(value).tobytes() if value is not None else b""
    except TypeError:
        key = b"?"
    if len(key) not in (0, KEY_BYTES):
        raise ValueError(f"parent is {value!r}; give the 16 bytes of the key in front, or none")
    return key


def text(name: str, value: Any) -> str:
    """A name that travels in a header."""
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}; give a str")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{name} is no text that UTF-8 can hold") from None
    if len(value) > NAME_CHARACTERS or size > NAME_BYTES:
        raise ValueError(
            f"{name} has {len(value)} characters, {size} bytes; give at most {NAME_CHARACTERS}"
            f" characters, {NAME_BYTES} bytes"
        )
    return value


def geometry_names(geometry: Geometry) -> Geometry:
    """``geometry``, if its names can be told to an agent."""
    for name in ("weights", "dtype", "layout"):
        text(f"{name} of the geometry", getattr(geometry, name))
    return geometry


def page_buffer(name: str, value: Any, size: int) -> memoryview:
    """A contiguous buffer of exactly ``size`` bytes, flat."""
    try:
        buffer = memoryview(value)
    except TypeError:
        raise ValueError(f"{name} is a {type(value).__name__}; give a buffer") from None
    if buffer.nbytes != size or not buffer.c_contiguous:
        raise ValueError(
            f"{name} of {buffer.nbytes} bytes; give a contiguous buffer of {size} bytes"
        )
    return buffer.cast("B") if size else memoryview(b"")


def checksums(value: Any, n: int, units: int = 1) -> NDArray[np.uint64]:
    """``n`` checksums as uint64[n]; where pages have several units theirs, uint64[n, units]."""
    if units > 1:
        given = isinstance(value, np.ndarray) and value.dtype == np.uint64
        if not given or value.shape != (n, units):
            raise ValueError(
                f"pages have {units} transfer units: give the checksums of all of them, uint64 of"
                f" shape ({n}, {units})"
            )
        return np.ascontiguousarray(value, "<u8")
    try:
        if isinstance(value, np.ndarray):
            array = value if value.dtype == np.uint64 else np.empty(0, np.uint8)
        else:
            array = np.array([operator.index(one) for one in value], np.uint64)
    except (TypeError, OverflowError):
        array = np.empty(0, np.uint8)
    if array.dtype != np.uint64 or array.shape != (n,):
        raise ValueError(f"checksums must be {n} numbers of 64 bits: give uint64 of shape ({n},)")
    return np.ascontiguousarray(array, "<u8")


def _real(value: Any) -> float:
    """``value`` as a float; not a number where it is none."""
    if isinstance(value, str | bytes | bytearray):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan
