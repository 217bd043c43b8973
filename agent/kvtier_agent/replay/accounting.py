"""Honest counting: what a request got, in blocks, tokens and compute.

A block is a *hit* when its page and every page before it in the prompt were really loaded and
their bytes verified; a page behind a hole is of no use to an engine, however warm it is. Every
other block is a *miss*. So for each request, hits + misses = blocks, whatever went wrong.

*Tokens*: a hit block counts the tokens in it. The whole is the prompt's length, blocks or not, so
that tokens which no page could hold count as recomputed.

*Compute*: prefilling a token at depth d costs in proportion to 1 + d / parity: the first
part is the layers' linear work, the second is attention over what came before. `parity` is the
depth at which both are equal (30,500 tokens for a dense 70B model with grouped-query attention;
`--flops-parity-tokens`). A block of t tokens that starts at depth d weighs t * (1 + d / parity).
`compute_saved` is the weight of the hit blocks over the weight of the whole prompt.

*Second half*: requests from index n // 2 on, when caches are warm.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier_agent.replay.trace import Request

FLOPS_PARITY_TOKENS = 30_500

_COLUMNS = (
    "l0", "l1", "l2", "miss", "hit_tokens", "tokens", "hit_weight", "weight",
)  # fmt: skip


def compute_weight(blocks: int, block_tokens: int, parity_tokens: float) -> float:
    """Weight of the first `blocks` full blocks of a prompt."""
    slope = block_tokens / parity_tokens
    return block_tokens * (blocks + slope * blocks * (blocks - 1) / 2)


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over a run of requests; rates are 0 when there was nothing to ask."""

    l0: int
    l1: int
    l2: int
    miss: int
    hit_tokens: int
    tokens: int
    hit_weight: float
    weight: float

    @property
    def hits(self) -> int:
        return self.l0 + self.l1 + self.l2

    @property
    def blocks(self) -> int:
        return self.hits + self.miss

    @property
    def block_hit_rate(self) -> float:
        return self.hits / self.blocks if self.blocks else 0.0

    @property
    def token_hit_rate(self) -> float:
        return self.hit_tokens / self.tokens if self.tokens else 0.0

    @property
    def compute_saved(self) -> float:
        return self.hit_weight / self.weight if self.weight else 0.0


class Accounts:
    """One row per request of a run of known length.

    Args:
        requests: how many requests there will be, all copies together.
        block_tokens: tokens in a full block.
        parity_tokens: see `compute_weight`.
    """

    def __init__(
        self, requests: int, block_tokens: int, parity_tokens: float = FLOPS_PARITY_TOKENS
    ) -> None:
        self._rows: npt.NDArray[np.float64] = np.zeros((requests, len(_COLUMNS)))
        self._used = 0
        self.block_tokens = block_tokens
        self.parity_tokens = parity_tokens

    def __len__(self) -> int:
        return self._used

    def add(self, request: Request, hit_tiers: npt.NDArray[np.uint8]) -> None:
        """Book one request whose first len(hit_tiers) blocks were hits in these tiers (0, 1, 2)."""
        blocks, hits = len(request.hash_ids), len(hit_tiers)
        if hits > blocks:
            raise ValueError(f"{hits} hits for {blocks} blocks")
        by_tier = np.bincount(hit_tiers, minlength=3)
        if len(by_tier) > 3:
            raise ValueError("a hit is in tier 0, 1 or 2")
        self._rows[self._used] = (
            *by_tier.tolist(),
            blocks - hits,
            self._tokens(request, hits),
            request.input_length,
            self._weight(request, hits),
            self._prompt_weight(request),
        )
        self._used += 1

    def totals(self, start: int = 0) -> Totals:
        """Sums over the requests from index `start` on."""
        sums = self._rows[start : self._used].sum(axis=0)
        l0, l1, l2, miss, hit_tokens, tokens = (int(value) for value in sums[:6])
        return Totals(l0, l1, l2, miss, hit_tokens, tokens, float(sums[6]), float(sums[7]))

    def second_half(self) -> Totals:
        return self.totals(self._used // 2)

    def _tokens(self, request: Request, hits: int) -> int:
        if hits and hits == len(request.hash_ids):
            return (hits - 1) * self.block_tokens + request.last_tokens
        return hits * self.block_tokens

    def _weight(self, request: Request, hits: int) -> float:
        full = compute_weight(hits, self.block_tokens, self.parity_tokens)
        if hits and hits == len(request.hash_ids):
            missing = self.block_tokens - request.last_tokens
            full -= missing * self._slope(hits - 1)
        return full

    def _prompt_weight(self, request: Request) -> float:
        blocks = len(request.hash_ids)
        outside = request.input_length - self._tokens(request, blocks)
        return self._weight(request, blocks) + outside * self._slope(blocks)

    def _slope(self, blocks_before: int) -> float:
        return 1 + blocks_before * self.block_tokens / self.parity_tokens
