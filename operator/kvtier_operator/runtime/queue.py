"""The work queue: which key is reconciled next, and when.

The rules are those of every good controller, kept in one place and without a clock of its own:

- *deduplicating*: a key that waits is not added twice; ten events on one object are one reconcile;
- *serial per key*: a key that is being worked on is never handed out again; when it was added
  meanwhile it comes again afterwards, so that no event is lost;
- *delayed re-adds*: the earliest wish wins, an immediate add beats a delayed one;
- *back-off*: a key that failed comes again after base x 2^failures with a jitter of half to one
  and a half, never later than `retry_max` x 1.5; success forgets the failures. Until the base delay
  is over an event about the key does not bring it forward, so that a failing object with many
  events cannot spin;
- *rate limited*: a token bucket over all keys bounds the reconciles per second;
- *two lanes*: urgent keys (policies) before the others (nodes), so that one policy does not queue
  behind a thousand nodes.

`QueueState` is pure: time goes in as an argument. `WorkQueue` puts an event loop around it.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["QueueLimits", "QueueState", "WorkQueue"]

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Seconds, seconds, reconciles per second, reconciles."""

    retry_base: float = 0.2
    retry_max: float = 60.0
    rate: float = 500.0
    burst: int = 1000


@dataclass(slots=True)
class QueueState(Generic[Key]):
    """The state of the queue; ``now`` is seconds on one monotonic clock throughout."""

    limits: QueueLimits
    urgent: Callable[[Key], bool]
    random: Callable[[], float]
    """Uniform in [0, 1): the jitter."""
    _due: dict[Key, float] = field(default_factory=dict)
    _lanes: tuple[list[tuple[float, int, Key]], list[tuple[float, int, Key]]] = field(
        default_factory=lambda: ([], [])
    )
    _busy: set[Key] = field(default_factory=set)
    _again: dict[Key, float] = field(default_factory=dict)
    _failures: dict[Key, int] = field(default_factory=dict)
    _held_until: dict[Key, float] = field(default_factory=dict)
    _sequence: int = 0
    _tokens: float | None = None
    _filled_at: float = 0.0

    def __len__(self) -> int:
        """Keys that wait, now or for later."""
        return len(self._due) + len(self._again)

    @property
    def busy(self) -> int:
        """Keys that are being worked on."""
        return len(self._busy)

    def failures(self, key: Key) -> int:
        """Failures of ``key`` in a row."""
        return self._failures.get(key, 0)

    def add(self, key: Key, now: float, after: float = 0.0) -> None:
        """Wish to see ``key`` handed out ``after`` seconds from now; the earliest wish counts."""
        due = max(now + after, self._held_until.get(key, now))
        if key in self._busy:
            self._again[key] = min(due, self._again.get(key, due))
            return
        current = self._due.get(key)
        if current is None or due < current:
            self._due[key] = due
            self._sequence += 1
            lane = self._lanes[0 if self.urgent(key) else 1]
            heapq.heappush(lane, (due, self._sequence, key))

    def forget(self, key: Key) -> None:
        """The object behind ``key`` is gone: nothing more is owed to it."""
        self._due.pop(key, None)
        self._again.pop(key, None)
        self._failures.pop(key, None)
        self._held_until.pop(key, None)

    def take(self, now: float) -> Key | None:
        """The next key that is due, marked busy; None when there is none or the rate is used up."""
        if self._refill(now) < 1.0:
            return None
        for lane in self._lanes:
            if self._head(lane) <= now:
                key = heapq.heappop(lane)[2]
                del self._due[key]
                self._busy.add(key)
                self._tokens = self._refill(now) - 1.0
                return key
        return None

    def done(self, key: Key, now: float) -> None:
        """``key`` succeeded: its failures are forgotten."""
        self._failures.pop(key, None)
        self._held_until.pop(key, None)
        self._release(key, now)

    def failed(self, key: Key, now: float, at_least: float = 0.0) -> float:
        """``key`` failed: it comes again after its back-off, which is returned in seconds.

        ``at_least`` is what the server asked for (Retry-After), in seconds."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        ceiling = min(self.limits.retry_max, self.limits.retry_base * 2.0 ** min(failures, 30))
        delay = max(at_least, ceiling * (0.5 + self.random()))
        self._held_until[key] = now + min(delay, max(at_least, self.limits.retry_base))
        self._release(key, now)
        self.add(key, now, delay)
        return delay

    def hurry(self, now: float) -> None:
        """What failed was not the keys' fault and is over: all that failed are due now."""
        failed, self._failures = list(self._failures), {}
        self._held_until.clear()
        for key in failed:
            self.add(key, now)

    def next_wakeup(self, now: float) -> float | None:
        """Seconds until `take` may have something; None when nothing waits."""
        due = min(self._head(lane) for lane in self._lanes)
        if due == _NEVER:
            return None
        missing = 1.0 - self._refill(now)
        return max(0.0, due - now, missing / self.limits.rate)

    def _head(self, lane: list[tuple[float, int, Key]]) -> float:
        """When the first key of the lane is due; entries that an earlier wish for the same key
        has overtaken are thrown away on the way."""
        while lane and self._due.get(lane[0][2]) != lane[0][0]:
            heapq.heappop(lane)
        return lane[0][0] if lane else _NEVER

    def _release(self, key: Key, now: float) -> None:
        self._busy.discard(key)
        due = self._again.pop(key, None)
        if due is not None:
            self.add(key, now, max(0.0, due - now))

    def _refill(self, now: float) -> float:
        """Tokens in the bucket."""
        if self._tokens is None:
            self._tokens = float(self.limits.burst)
        else:
            elapsed = max(0.0, now - self._filled_at)
            self._tokens = min(self.limits.burst, self._tokens + elapsed * self.limits.rate)
        self._filled_at = now
        return self._tokens


_NEVER = float("inf")


class WorkQueue(Generic[Key]):
    """`QueueState` on an event loop, for any number of adders and one taker."""

    def __init__(self, state: QueueState[Key], clock: Callable[[], float]) -> None:
        self.state = state
        self._clock = clock
        self._wake = asyncio.Event()

    def add(self, key: Key, after: float = 0.0) -> None:
        """See `QueueState.add`."""
        self.state.add(key, self._clock(), after)
        self._wake.set()

    def forget(self, key: Key) -> None:
        """See `QueueState.forget`."""
        self.state.forget(key)

    async def take(self) -> Key:
        """The next key, as soon as one is due."""
        while True:
            now = self._clock()
            key = self.state.take(now)
            if key is not None:
                return key
            wait = self.state.next_wakeup(now)
            self._wake.clear()
            try:
                async with asyncio.timeout(wait):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def done(self, key: Key) -> None:
        """See `QueueState.done`."""
        self.state.done(key, self._clock())
        self._wake.set()

    def failed(self, key: Key, at_least: float = 0.0) -> float:
        """See `QueueState.failed`."""
        delay = self.state.failed(key, self._clock(), at_least)
        self._wake.set()
        return delay

    def hurry(self) -> None:
        """See `QueueState.hurry`."""
        self.state.hurry(self._clock())
        self._wake.set()
