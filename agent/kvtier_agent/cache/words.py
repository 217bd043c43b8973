"""Arrays of records as arrays of words. Numpy walks over the fields of a structured type one by one
when it copies chosen elements; as plain words they are copied whole, six times faster."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def as_words(records: NDArray[Any]) -> NDArray[np.uint64]:
    """Records (n,) of whole words as (n, words) uint64, without a copy where possible."""
    words = np.ascontiguousarray(records).view(np.uint64)
    return words.reshape(len(records), records.itemsize // 8)


def take_records(records: NDArray[Any], where: NDArray[np.integer]) -> NDArray[Any]:
    """`records[where]`."""
    return as_words(records).take(where, axis=0).view(records.dtype).reshape(-1)


def has_repeats(values: NDArray[Any]) -> bool:
    """Does a value come twice? In a third of the time of `np.unique`, for the arrays of a call."""
    ordered = np.sort(values)
    return bool((ordered[1:] == ordered[:-1]).any())
