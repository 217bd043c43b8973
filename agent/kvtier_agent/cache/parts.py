"""Tensor-parallel groups: each rank's part of a page, and when the page counts.

The ranks of an engine store a part of each page each, in a record and a slot of its own. What a
page is called is the same on all of them; a part's key is the page's key XOR the mask of its rank
(`identity.rank_mask`). Keys are hashes, so two parts share a key no sooner than two pages do, and
no hash has to be made for each page and rank.

A page counts only when every rank's part is there (`whole_pages`), and it is then as far away as
its farthest part. Parts leave one by one, as any record does: one that is gone makes the page a
miss for the whole group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.identity import KeyArray, rank_mask
from kvtier_agent.cache.results import MISS, U8, DeleteStatus


@cache
def _mask(rank: int, tp: int) -> NDArray[np.uint8]:
    return np.frombuffer(rank_mask(rank, tp), dtype=np.uint8)


def part_keys(keys: KeyArray, rank: int, tp: int) -> KeyArray:
    """Keys (n, 16) of one rank's parts of pages. With one rank the part is the page."""
    return keys if tp == 1 else keys ^ _mask(rank, tp)


def part_key(key: bytes, rank: int, tp: int) -> bytes:
    """The same for one key, such as that of a parent."""
    return part_keys(np.frombuffer(key, dtype=np.uint8), rank, tp).tobytes()


def all_parts(keys: KeyArray, tp: int) -> KeyArray:
    """Keys (tp * n, 16) of all parts: those of rank 0 in page order, then those of rank 1, ..."""
    return np.concatenate([part_keys(keys, rank, tp) for rank in range(tp)])


def whole_pages(lookup: Callable[[KeyArray], U8], keys: KeyArray, tp: int) -> U8:
    """The tier of each page (n,): the lowest of its parts, MISS where one is missing. `lookup`:
    tiers of parts by their keys. What is missing on one rank is not asked for on the next."""
    tiers = lookup(part_keys(keys, 0, tp))
    for rank in range(1, tp):
        there = np.flatnonzero(tiers != MISS)
        if not there.size:
            break
        tiers[there] = np.maximum(tiers[there], lookup(part_keys(keys[there], rank, tp)))
    return tiers


def whole_deleted(status: U8, tp: int) -> U8:
    """What became of pages (n,) whose parts' DeleteStatus are `status` (tp * n,)."""
    parts = status.reshape(tp, -1)
    marked = (parts == DeleteStatus.MARKED).any(axis=0)
    deleted = (parts == DeleteStatus.DELETED).any(axis=0)
    return np.select(
        [marked, deleted], [np.uint8(DeleteStatus.MARKED), np.uint8(DeleteStatus.DELETED)],
        np.uint8(DeleteStatus.ABSENT),
    )  # fmt: skip
