"""How a tier on NVMe is cut into segments: pure functions of its size and of the size of a slot."""

from __future__ import annotations

SEGMENT_BYTES = 256 << 20
"""A full segment: large enough for a drive's own erase blocks, small enough to be emptied soon."""
MANY_SEGMENTS = 64
"""Into so many a tier is cut that is too small for full segments, since about one and a half of
them hold no pages: the one being filled, and the one that is kept free."""
FEW_SLOTS = 16
"""Segments of the smallest tiers, of which they still have eight."""
FILE_BYTES = 4096
"""What a file system may take for a file's extents, beside its slots."""


def slots_per_segment(stride: int) -> int:
    """Slots of `stride` bytes in a full segment (at least one). Slot numbers are cut by it."""
    return max(1, SEGMENT_BYTES // stride)


def segment_slots(limit: int, per_segment: int) -> int:
    """Slots that a segment of a tier of `limit` slots is given (at least one)."""
    return max(1, min(per_segment, max(limit // MANY_SEGMENTS, min(limit // 8, FEW_SLOTS))))


def most_segments(limit: int, per_segment: int) -> int:
    """Into so many segments a tier of `limit` slots is cut at most. Never falls as tiers grow."""
    few = min(limit, 2 * 8 - 1)
    many = min(-(-limit // FEW_SLOTS), MANY_SEGMENTS + MANY_SEGMENTS // FEW_SLOTS)
    return max(few, many, -(-limit // per_segment))


def bytes_for(slots: int, stride: int) -> int:
    """Bytes of blocks that so many slots of `stride` bytes may take, in files of their own."""
    return slots * stride + most_segments(slots, slots_per_segment(stride)) * FILE_BYTES


def slots_within(cap_bytes: int, stride: int) -> int:
    """The most slots for which `bytes_for` is at most `cap_bytes`."""
    low, high = 0, max(0, cap_bytes // stride)
    while low < high:
        middle = (low + high + 1) // 2
        if bytes_for(middle, stride) <= cap_bytes:
            low = middle
        else:
            high = middle - 1
    return low
