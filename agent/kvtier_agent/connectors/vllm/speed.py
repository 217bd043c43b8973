"""How fast this engine computes a prompt: what the agent weighs a load against.

Measured on the engine's own steps, so that model, hardware and load are in it. Only steps with at
least a page of tokens count: a decode step is bound by memory and says nothing of prefill.
"""

from __future__ import annotations

from kvtier_agent.server.protocol import LEAST_RATE, MOST_RATE

WEIGHT = 0.3
"""Of the newest step in the moving average."""


class PrefillSpeed:
    """Exponentially weighted tokens per second over prefill steps. The clock is passed in."""

    def __init__(self, least_tokens: int) -> None:
        """least_tokens: steps that compute fewer are not counted."""
        self._least_tokens = least_tokens
        self._began: float | None = None
        self.tokens_per_second: float | None = None

    def begin(self, now: float) -> None:
        """A forward pass starts; `now` in seconds."""
        self._began = now

    def end(self, now: float, tokens: int) -> None:
        """It has ended and computed `tokens`; a second call for the same step does nothing."""
        began, self._began = self._began, None
        if began is None or tokens < self._least_tokens or now <= began:
            return
        measured = min(max(tokens / (now - began), LEAST_RATE), MOST_RATE)
        if self.tokens_per_second is None:
            self.tokens_per_second = measured
        else:
            self.tokens_per_second += WEIGHT * (measured - self.tokens_per_second)
