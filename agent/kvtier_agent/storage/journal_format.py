"""The bytes of L2's journal: events, frames, file headers. Nothing here opens a file.

    file    header (128) | frame | frame | ...       header: what the file is and whose
    frame   length u32, kind u32, checksum u64 | payload of `length` bytes

A frame holds some events of 64 bytes each. Its checksum (XXH3-64) covers length, kind and payload
and is seeded with the file's nonce and the frame's offset, so what an earlier file or an earlier
frame left in the same place is never taken for a frame. A log ends at the first frame that is short
or wrong. A checkpoint is the same with a last frame that says how many events there are.

Every version of this format begins with the same header, with the version and its checksum where
they are now. So a newer version is told from damage, and refused.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtier_agent.storage.segment import PageStamp

FORMAT_VERSION = 1
HEADER_BYTES = 128
LOG_MAGIC = b"KVTIERJL"
CHECKPOINT_MAGIC = b"KVTIERCP"

FRAME_EVENTS = 1 << 14
"""Events per frame at most: one MiB. A longer length is damage, and nothing is allocated for it."""


class EventKind(IntEnum):
    """What happened. `slot` is a slot of L2, for RESET the number of a segment."""

    PUT = 1  # the page's bytes lie in the slot
    DEL = 2  # the slot holds no page any more
    RESET = 3  # the segment is written anew: every earlier event about it is void


EVENT = np.dtype(
    [
        ("kind", "u1"),
        ("reserved", "u1"),
        ("tenant", "<u2"),  # 0 where nobody is known, and in what earlier versions wrote
        ("slot", "<u4"),
        ("generation", "<u4"),
        ("depth", "<u4"),
        ("key", "u1", 16),
        ("parent", "u1", 16),
        ("checksum", "<u8"),
        ("sequence", "<u8"),
    ]
)
Events = NDArray[Any]
"""Array of `EVENT`, in the order in which they happened."""

NO_EVENTS: Events = np.empty(0, dtype=EVENT)

_HEAD = struct.Struct("<8sII16s4Q")  # magic, version, reserved, fingerprint, ...
_CHECKSUM = struct.Struct("<Q")
_FRAME = struct.Struct("<IIQ")
_EVENTS_FRAME, _END_FRAME = 1, 2
_MASK = (1 << 64) - 1


class NewerFormatError(Exception):
    """A newer version wrote this file. `version`: the one it says."""

    def __init__(self, version: int) -> None:
        super().__init__(f"journal format {version}")
        self.version = version


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose pages a journal is about; slots mean nothing under another one."""

    fingerprint: bytes
    """Of the geometry, 16 bytes."""
    per_segment: int
    """Slots per segment."""
    stride: int
    """Bytes per slot."""


@dataclass(frozen=True, slots=True)
class FileHeader:
    """The first 128 bytes of a log or checkpoint."""

    magic: bytes
    identity: Identity
    number: int
    """A log's place in the order; a checkpoint holds what all logs with lower numbers said."""
    nonce: int
    """64 random bits, so that no two files share frames."""

    def encode(self) -> bytes:
        one = self.identity
        head = _HEAD.pack(
            *(self.magic, FORMAT_VERSION, 0, one.fingerprint, one.per_segment, one.stride),
            *(self.number, self.nonce),
        )
        return (head + _CHECKSUM.pack(_sum(head, 0))).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def decode(cls, data: bytes | memoryview) -> FileHeader | None:
        """None: no header, or a damaged one. Raises NewerFormatError."""
        if len(data) < _HEAD.size + _CHECKSUM.size:
            return None
        (magic, version, _, fingerprint, per_segment, stride, number, nonce) = _HEAD.unpack_from(
            data
        )
        (own,) = _CHECKSUM.unpack_from(data, _HEAD.size)
        whole = own == _sum(bytes(data[: _HEAD.size]), 0)
        if magic not in (LOG_MAGIC, CHECKPOINT_MAGIC) or not whole:
            return None
        if version > FORMAT_VERSION:
            raise NewerFormatError(version)
        return cls(magic, Identity(fingerprint, per_segment, stride), number, nonce)


def frame(events: Events, nonce: int, offset: int) -> bytes:
    """One frame for `events` (at most `FRAME_EVENTS`) that is to lie at `offset`."""
    return _frame(_EVENTS_FRAME, events.tobytes(), nonce, offset)


def end_frame(count: int, nonce: int, offset: int) -> bytes:
    """The last frame of a checkpoint of `count` events."""
    return _frame(_END_FRAME, _CHECKSUM.pack(count), nonce, offset)


@dataclass(slots=True)
class Scanner:
    """Reads frames from a file that is fed to it in pieces, whatever their size."""

    nonce: int
    offset: int = HEADER_BYTES
    """End of the last good frame in the file."""
    ended: bool = False
    """Nothing more can be read: damage, or a checkpoint's last frame."""
    complete: bool = False
    """A checkpoint's last frame was there, and its count is right."""
    count: int = 0
    _rest: bytes = field(default=b"", repr=False)

    def feed(self, data: bytes) -> Events:
        """The events of all frames that are whole now. Of a frame that is cut the rest may come
        with the next call; if none comes, the file ends at `offset`."""
        data = self._rest + data if self._rest else data
        view, at, parts = memoryview(data), 0, []
        while not self.ended and len(data) - at >= _FRAME.size:
            length, kind, own = _FRAME.unpack_from(data, at)
            if not self._plausible(length, kind):
                self.ended = True
                break
            if len(data) - at < _FRAME.size + length:
                break
            payload = view[at + _FRAME.size : at + _FRAME.size + length]
            if own != _frame_sum(length, kind, payload, self.nonce, self.offset):
                self.ended = True
                break
            if kind == _END_FRAME:
                self.ended = True
                self.complete = _CHECKSUM.unpack(payload)[0] == self.count
            else:
                parts.append(payload)
                self.count += length // EVENT.itemsize
            at += _FRAME.size + length
            self.offset += _FRAME.size + length
        self._rest = b"" if self.ended else bytes(view[at:])
        return np.frombuffer(b"".join(parts), dtype=EVENT)

    @staticmethod
    def _plausible(length: int, kind: int) -> bool:
        if kind == _END_FRAME:
            return length == _CHECKSUM.size
        count, odd = divmod(length, EVENT.itemsize)
        return kind == _EVENTS_FRAME and not odd and 0 < count <= FRAME_EVENTS


def puts(
    slots: NDArray[np.uint32], generations: NDArray[np.uint32], stamp: PageStamp, sequence: int
) -> Events:
    """PUT for each page of a batch; sequence numbers go up from `sequence`."""
    events = np.zeros(len(slots), dtype=EVENT)
    events["kind"] = EventKind.PUT
    events["slot"] = slots
    events["generation"] = generations
    events["key"] = stamp.keys
    events["parent"] = stamp.parents
    events["depth"] = stamp.depths
    events["checksum"] = stamp.checksums
    if stamp.tenants is not None:
        events["tenant"] = stamp.tenants
    events["sequence"] = np.arange(sequence, sequence + len(slots), dtype=np.uint64)
    return events


def deletions(slots: NDArray[np.uint32], generations: NDArray[np.uint32]) -> Events:
    """DEL for each slot."""
    events = np.zeros(len(slots), dtype=EVENT)
    events["kind"] = EventKind.DEL
    events["slot"] = slots
    events["generation"] = generations
    return events


def resets(segments: Any, generations: Any) -> Events:
    """RESET for each segment."""
    events = np.zeros(len(segments), dtype=EVENT)
    events["kind"] = EventKind.RESET
    events["slot"] = segments
    events["generation"] = generations
    return events


def in_frames(events: Events) -> Iterator[Events]:
    """Cut into what fits a frame."""
    for start in range(0, len(events), FRAME_EVENTS):
        yield events[start : start + FRAME_EVENTS]


def _frame(kind: int, payload: bytes, nonce: int, offset: int) -> bytes:
    own = _frame_sum(len(payload), kind, payload, nonce, offset)
    return _FRAME.pack(len(payload), kind, own) + payload


def _frame_sum(length: int, kind: int, payload: bytes | memoryview, nonce: int, offset: int) -> int:
    seed = (nonce + offset * 0x9E3779B97F4A7C15 + (kind << 56) + length) & _MASK
    return _sum(payload, seed)


def _sum(data: bytes | memoryview, seed: int) -> int:
    value: int = xxhash.xxh3_64_intdigest(data, seed=seed)
    return value
