"""Keys of a trace's blocks are those an engine would chain, made once, and apart between copies."""

from __future__ import annotations

import numpy as np
from kvtier_agent.cache.identity import child_key_from_digest, root_key
from kvtier_agent.replay.keys import ChainKeys

FINGERPRINT = b"f" * 16


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.uint64)


def test_keys_are_chained_over_the_ids() -> None:
    chain = ChainKeys(FINGERPRINT, b"salt")
    keys = chain.of(ids(5, 6))
    first = child_key_from_digest(root_key(FINGERPRINT, b"salt"), (5).to_bytes(16, "little"))
    second = child_key_from_digest(first, (6).to_bytes(16, "little"))
    assert [key.tobytes() for key in keys] == [first, second]
    assert keys.flags.c_contiguous
    assert keys.shape == (2, 16)


def test_requests_share_keys_as_long_as_their_ids_agree() -> None:
    chain = ChainKeys(FINGERPRINT, b"")
    left, right = chain.of(ids(1, 2, 3, 4)), chain.of(ids(1, 2, 9, 4))
    assert np.array_equal(left[:2], right[:2])
    assert not np.array_equal(left[2], right[2])
    assert not np.array_equal(left[3], right[3]), "the same block after another one"
    assert len(chain) == 6
    assert np.array_equal(chain.of(ids(1, 2, 3, 4)), left)


def test_copies_and_geometries_share_nothing() -> None:
    one = ChainKeys(FINGERPRINT, b"0").of(ids(1, 2))
    other = ChainKeys(FINGERPRINT, b"1").of(ids(1, 2))
    third = ChainKeys(b"g" * 16, b"0").of(ids(1, 2))
    assert len({key.tobytes() for keys in (one, other, third) for key in keys}) == 6


def test_growth_keeps_what_was_there() -> None:
    chain = ChainKeys(FINGERPRINT, b"")
    numbers = np.arange(20_000, dtype=np.uint64)
    before = chain.of(numbers[:100])
    everything = chain.of(numbers)
    assert np.array_equal(everything[:100], before)
    assert len({key.tobytes() for key in everything}) == 20_000
    assert len(chain.of(ids())) == 0
