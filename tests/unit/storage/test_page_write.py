"""Writes that are under way while what they are written to changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xxhash
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.moves import MoveStatus
from kvtier_agent.storage.l2 import L2
from kvtier_agent.storage.page_write import PageWrite
from kvtier_agent.storage.segment import HeaderBlock, PageStamp
from kvtier_agent.storage.volume import Volume

PAGE = 8192
COUNT = 16


def test_what_was_begun_on_a_volume_that_left_is_not_taken_for_bytes_of_its_successor(
    tmp_path: Path,
) -> None:
    volumes = []
    for name in ("data0", "data1"):
        (tmp_path / name).mkdir()
        volumes.append(Volume(name, tmp_path / name, "default", allow_root_filesystem=True))
    l2 = L2(volumes[:1], Geometry.of_page_bytes(PAGE, 16))
    l2.limit(64 << 20, 0, "async")
    random = np.random.default_rng(1)
    arena = random.integers(0, 256, (COUNT, PAGE), dtype=np.uint8)
    keys = random.integers(0, 256, (COUNT, 16), dtype=np.uint8)
    sums = np.array([xxhash.xxh3_64_intdigest(page.tobytes()) for page in arena], np.uint64)
    stamp = PageStamp(keys, keys, np.zeros(COUNT, np.uint32), sums)
    slots = np.arange(COUNT, dtype=np.uint32)
    half = COUNT // 2
    uses = (np.full(half, 1, np.uint32), np.full(half, l2.per_segment, np.uint32))

    early = slots[:half]
    begun = PageWrite(l2, early, stamp.some(slice(0, half)), arena, early, uses, HeaderBlock(half))
    runs = list(begun.runs())
    for run in runs:
        run.segment.enter()
    l2.add(volumes[1])
    l2.withdraw({"data0"})
    status, _ = l2.write(slots[half:], stamp.some(slice(half, COUNT)), arena, slots[half:], uses)
    assert (status == MoveStatus.OK).all()
    for run in runs:
        begun.settle(run)
        run.segment.leave()

    assert not (begun.status == MoveStatus.OK).any()
    assert "the segment is gone" in begun.error
    found, _ = l2.read(slots[half:], keys[half:], sums[half:], arena, early)
    assert (found == MoveStatus.OK).all()
    l2.close()
