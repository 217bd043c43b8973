"""Notes in the header of a page table: what its records mean, for whoever opens the file later.

Each note is JSON at a fixed place, in front of it its length and CRC-32 (both u32, little-endian).
A note that was cut short by the end of its writer reads as absent, never as something else.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass
from typing import Any, Final, Protocol

_HEAD = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes `offset` to `offset + size` of the header."""

    offset: int
    size: int


SUSPECTS: Final = Place(128, 384)
"""`count` of the segments of L2 that are suspect now, and the `numbers` of the first of them."""
GEOMETRY: Final = Place(512, 4096)
"""`geometry`: the fields of `Geometry`; `fingerprint`: its `stored_as`, hex; `key_version`;
`l1_inode`, `l1_bytes`: the arena file that the slots are of."""
FROZEN: Final = Place(4608, 3072)
"""Names of the frozen prefixes, that of number 1 first."""
START: Final = Place(7680, 512)
"""How the writer's process started (`warm.Restart`)."""


class Buffer(Protocol):
    """A mapped file or a bytearray."""

    def __getitem__(self, where: slice, /) -> bytes | bytearray: ...

    def __setitem__(self, where: slice, what: bytes, /) -> None: ...


def write_note(buffer: Buffer, place: Place, value: Any) -> bool:
    """Replace a note. False: the value is too long for its place, which is empty now."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    start, end = place.offset, place.offset + _HEAD.size
    buffer[start:end] = bytes(_HEAD.size)
    if len(text) > place.size - _HEAD.size:
        return False
    buffer[end : end + len(text)] = text
    buffer[start:end] = _HEAD.pack(len(text), zlib.crc32(text))
    return True


def read_note(header: bytes, place: Place) -> Any:
    """The note, or None where there is none that is whole. `header`: the first bytes of the file,
    up to and with the place."""
    end = place.offset + _HEAD.size
    length, crc = _HEAD.unpack(header[place.offset : end])
    text = header[end : end + length]
    if not 0 < length <= place.size - _HEAD.size or zlib.crc32(text) != crc:
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None
