"""How fast this engine computes a prompt: what the agent weighs a load against.

Measured on the engine's own steps, so that model, hardware and load are in it. Only steps with at
least a page of tokens count: a decode step is bound by memory and says nothing of prefill.

The agent makes tokens deep in a prompt dearer by itself, by `1 + depth / parity`, so it is told the
speed at depth 0: what was measured, times that factor for the mean depth of the step's tokens.
"""

from __future__ import annotations

from kvtier_agent.server.protocol import LEAST_RATE, MOST_RATE

WEIGHT = 0.3
"""Of the newest step in the moving average."""


class PrefillSpeed:
    """Exponentially weighted tokens per second over prefill steps. The clock is passed in."""

    def __init__(self, least_tokens: int, parity_tokens: int) -> None:
        """least_tokens: steps that compute fewer are not counted. parity_tokens: the depth at which
        a token costs twice as much as the first one, as the agent assumes it."""
        self._least_tokens = least_tokens
        self._parity_tokens = parity_tokens
        self._began: float | None = None
        self.tokens_per_second: float | None = None

    def begin(self, now: float) -> None:
        """A forward pass starts; `now` in seconds."""
        self._began = now

    def counts(self, tokens: int) -> bool:
        """Does a step of so many tokens say anything of prefill?"""
        return tokens >= self._least_tokens

    def end(self, now: float, tokens: int, depth: float) -> None:
        """It has ended and computed `tokens`, which stand `depth` tokens deep on average; a second
        call for the same step does nothing."""
        began, self._began = self._began, None
        if began is None or not self.counts(tokens) or now <= began:
            return
        measured = tokens / (now - began) * (1 + depth / self._parity_tokens)
        measured = min(max(measured, LEAST_RATE), MOST_RATE)
        if self.tokens_per_second is None:
            self.tokens_per_second = measured
        else:
            self.tokens_per_second += WEIGHT * (measured - self.tokens_per_second)
