"""Hits and misses add up to blocks, tokens to tokens, and compute to its definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_agent.replay.accounting import Accounts, compute_weight
from kvtier_agent.replay.trace import Request

BLOCK = 512


def request(length: int, blocks: int | None = None) -> Request:
    count = -(-length // BLOCK) if blocks is None else blocks
    last = min(BLOCK, length - BLOCK * (count - 1)) if count else BLOCK
    ids = np.arange(count, dtype=np.uint64)
    return Request(0, length, 0, ids, last, last < BLOCK, "")


def weight_token_by_token(tokens: range, parity: float) -> float:
    """The definition, straight: each token weighs by the start of its block."""
    return sum(1 + (token // BLOCK) * BLOCK / parity for token in tokens)


@given(
    st.lists(st.tuples(st.integers(0, 6000), st.integers(0, 12), st.integers(0, 2)), max_size=20)
)
def test_hits_and_misses_are_blocks_whatever_happens(rows) -> None:
    accounts = Accounts(len(rows), BLOCK)
    for length, hits, tier in rows:
        asked = request(length)
        accounts.add(asked, np.full(min(hits, len(asked.hash_ids)), tier, dtype=np.uint8))
    totals, half = accounts.totals(), accounts.second_half()
    assert totals.blocks == sum(-(-length // BLOCK) for length, _, _ in rows)
    assert totals.tokens == sum(length for length, _, _ in rows)
    assert 0 <= totals.hit_tokens <= totals.tokens
    assert 0 <= totals.compute_saved <= 1 + 1e-9
    assert half.blocks <= totals.blocks


@pytest.mark.parametrize("length", [512, 700, 1024, 5000])
@pytest.mark.parametrize("parity", [1000.0, 30500.0])
def test_tokens_and_compute_of_a_prefix(length: int, parity: float) -> None:
    asked = request(length)
    for hits in range(len(asked.hash_ids) + 1):
        accounts = Accounts(1, BLOCK, parity)
        accounts.add(asked, np.zeros(hits, dtype=np.uint8))
        totals = accounts.totals()
        hit_tokens = min(length, hits * BLOCK)
        assert totals.hit_tokens == hit_tokens
        assert totals.compute_saved == pytest.approx(
            weight_token_by_token(range(hit_tokens), parity)
            / weight_token_by_token(range(length), parity)
        )


def test_tokens_without_a_block_count_as_recomputed() -> None:
    asked = request(1030, blocks=2)
    accounts = Accounts(1, BLOCK)
    accounts.add(asked, np.zeros(2, dtype=np.uint8))
    totals = accounts.totals()
    assert (totals.hit_tokens, totals.tokens, totals.block_hit_rate) == (1024, 1030, 1.0)
    assert totals.compute_saved < 1


def test_deep_blocks_weigh_more() -> None:
    assert compute_weight(2, BLOCK, 1e12) == pytest.approx(2 * BLOCK)
    assert compute_weight(101, BLOCK, 51_200) - compute_weight(100, BLOCK, 51_200) == 2 * BLOCK


def test_the_second_half_begins_at_half_the_requests() -> None:
    accounts = Accounts(5, BLOCK)
    for index in range(5):
        accounts.add(request(512), np.zeros(int(index >= 2), dtype=np.uint8))
    assert accounts.totals().block_hit_rate == pytest.approx(3 / 5)
    assert accounts.second_half().block_hit_rate == 1.0
    assert Accounts(0, BLOCK).second_half().block_hit_rate == 0.0


def test_what_cannot_be_is_refused() -> None:
    accounts = Accounts(2, BLOCK)
    with pytest.raises(ValueError, match="2 hits for 1 blocks"):
        accounts.add(request(512), np.zeros(2, dtype=np.uint8))
    with pytest.raises(ValueError, match="tier"):
        accounts.add(request(512), np.full(1, 255, dtype=np.uint8))
