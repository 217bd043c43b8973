"""What is a hit: a page that an engine got and did not have to compute again.

A ``lookup`` opens a *question* of n pages. What the engine then loads decides it:

- pages are hits, in the layer where the load found them, from the first page on until the first
  one that was missing, late or bad: behind a gap an engine has to compute anyway;
- all other pages of the question are misses: not cached, not worth loading, not loaded.

A question is settled once, as a whole, so that at every moment ``hits + misses == pages asked``,
by page and by token. It is settled when the pages that the gate advised to load were loaded and
released, at the first gap, at once where the gate advised nothing, when the same client asks its
next question, when its client is gone, or after ``QUESTION_SECONDS``.

Engines that have several requests in flight, or that ask in one process and load in another,
number their questions (``request``, unique within the trust domain). A number asked again before
anything was loaded for it, as schedulers do in every step, is the same question. A load that
belongs to no question is one of its own.

Pure: the clock is an argument, nothing is ever counted twice.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.results import MISS

QUESTION_SECONDS: Final = 60.0
"""A question nobody loads for is settled after this."""
MOST_QUESTIONS: Final = 65_536
"""Open numbered questions; past it the oldest is settled. Answered ones are remembered alike."""
LAYERS: Final = 3


@dataclass
class Tally:
    """Settled pages and tokens; index 0, 1, 2 = hits by layer, 3 = misses."""

    pages: list[int] = field(default_factory=lambda: [0] * (LAYERS + 1))
    tokens: list[int] = field(default_factory=lambda: [0] * (LAYERS + 1))
    asked_pages: int = 0
    asked_tokens: int = 0
    questions: int = 0


@dataclass(eq=False, slots=True)
class _Question:
    pages: int
    page_tokens: int
    last_tokens: int
    advised: int
    depth: int
    since: float
    owner: int
    number: int
    loaded: int = 0
    open_leases: int = 0
    broken: bool = False
    hits: list[int] = field(default_factory=lambda: [0] * LAYERS)
    hit_tokens: list[int] = field(default_factory=lambda: [0] * LAYERS)
    settled: bool = False

    def tokens(self, pages: int) -> int:
        """Tokens in the first ``pages`` pages."""
        full = pages * self.page_tokens
        return full if pages < self.pages else full - self.page_tokens + self.last_tokens


@dataclass(eq=False, slots=True)
class _Lease:
    """`tiers`: of the first of its `pages`, as far as the last hit."""

    question: _Question
    pages: int
    tiers: NDArray[np.uint8]
    start: int
    since: float
    owner: int


class Accounts:
    """The hits and misses of one trust domain."""

    def __init__(self, lease_seconds: float) -> None:
        """``lease_seconds``: how long a lease may last before the cache takes it back."""
        self.tally = Tally()
        self._lease_seconds = lease_seconds
        self._numbered: OrderedDict[int, _Question] = OrderedDict()
        self._current: dict[int, _Question] = {}
        self._answered: OrderedDict[int, int] = OrderedDict()
        self._leases: OrderedDict[int, _Lease] = OrderedDict()

    def asked(
        self,
        now: float,
        owner: int,
        number: int,
        pages: int,
        page_tokens: int,
        *,
        depth: int = 0,
        total_tokens: int | None = None,
        advised: int = 0,
    ) -> None:
        """A lookup of ``pages`` pages, of which ``advised`` are worth loading.

        ``owner``: the client; ``number``: of the question, 0 = the client's only one. The last
        page has fewer tokens where ``total_tokens`` ends inside it.
        """
        if pages <= 0:
            return
        last = page_tokens
        if total_tokens is not None:
            last = max(0, min(page_tokens, total_tokens - depth - (pages - 1) * page_tokens))
        question = _Question(
            pages, page_tokens, last, min(advised, pages), depth, now, owner, number
        )
        if number:
            before = self._numbered.pop(number, None)
            if before is not None and (before.loaded or before.depth != depth):
                self._settle(before)
            if not question.advised:
                if self._answered.get(number) != depth:
                    self._remember_answer(number, depth)
                    self._settle(question)
                return
            self._answered.pop(number, None)
            self._numbered[number] = question
            while len(self._numbered) > MOST_QUESTIONS:
                self._settle(self._numbered.popitem(last=False)[1])
        else:
            previous = self._current.pop(owner, None)
            if previous is not None:
                self._settle(previous)
            if question.advised:
                self._current[owner] = question
            else:
                self._settle(question)

    def loaded(
        self, now: float, owner: int, number: int, lease: int, tiers: NDArray[np.uint8],
        page_tokens: int,
    ) -> None:  # fmt: skip
        """A load was answered with ``lease``; ``tiers``: uint8[n], 255 = a miss."""
        n = len(tiers)
        question = self._numbered.get(number) if number else self._current.get(owner)
        if question is None or question.settled or question.loaded + n > question.pages:
            question = _Question(n, page_tokens, page_tokens, n, 0, now, owner, 0)
        kept = _to_the_last_hit(tiers)
        self._leases[lease] = _Lease(question, n, kept, question.loaded, now, owner)
        question.loaded += n
        question.open_leases += 1

    def corrected(self, lease: int, tiers: NDArray[np.uint8]) -> None:
        """What has become of a load that was answered before it was done; ``tiers``: as for
        ``loaded``."""
        held = self._leases.get(lease)
        if held is not None:
            held.tiers = _to_the_last_hit(tiers)

    def released(
        self, lease: int, bad: NDArray[np.integer] | None = None, *, used: bool = True
    ) -> None:
        """The lease ended; ``bad``: indexes of pages whose bytes were wrong; not ``used``: the
        answer came too late for the client, which got none of the pages."""
        held = self._leases.pop(lease, None)
        if held is None:
            return
        question = held.question
        gaps = held.tiers == MISS
        if bad is not None and bad.size:
            gaps = gaps.copy()
            gaps[bad[bad < len(gaps)]] = True
        first = int(np.argmax(gaps)) if gaps.any() else len(gaps)
        if not used:
            first = 0
        if not question.broken:
            self._count(question, held, first)
        question.broken = question.broken or first < held.pages
        question.open_leases -= 1
        if not question.open_leases and (
            question.broken or question.loaded >= question.advised or question.settled
        ):
            self._forget(question)
            self._settle(question)

    def gone(self, owner: int) -> None:
        """The client is gone: its questions are settled with what it got."""
        for lease in [k for k, v in self._leases.items() if v.owner == owner]:
            self.released(lease)
        current = self._current.pop(owner, None)
        if current is not None:
            self._settle(current)
        for number in [k for k, v in self._numbered.items() if v.owner == owner]:
            self._settle(self._numbered.pop(number))

    def expire(self, now: float) -> None:
        """Settle what nobody came back for."""
        while self._leases:
            lease, held = next(iter(self._leases.items()))
            if now - held.since <= self._lease_seconds:
                break
            self.released(lease)
        for number in list(self._numbered):
            question = self._numbered[number]
            if now - question.since <= QUESTION_SECONDS:
                break
            if not question.open_leases:
                self._settle(self._numbered.pop(number))
        for owner, question in list(self._current.items()):
            if now - question.since > QUESTION_SECONDS and not question.open_leases:
                self._settle(self._current.pop(owner))

    @property
    def open_questions(self) -> int:
        """Questions that are not settled yet."""
        return len(self._numbered) + len(self._current)

    def _count(self, question: _Question, held: _Lease, first: int) -> None:
        counts = np.bincount(held.tiers[:first], minlength=LAYERS)[:LAYERS].tolist()
        for layer in range(LAYERS):
            question.hits[layer] += counts[layer]
            question.hit_tokens[layer] += counts[layer] * question.page_tokens
        end = held.start + first
        if first and end == question.pages:
            short = question.page_tokens - question.last_tokens
            question.hit_tokens[int(held.tiers[first - 1])] -= short

    def _forget(self, question: _Question) -> None:
        if question.number and self._numbered.get(question.number) is question:
            del self._numbered[question.number]
        elif self._current.get(question.owner) is question:
            del self._current[question.owner]

    def _remember_answer(self, number: int, depth: int) -> None:
        self._answered[number] = depth
        while len(self._answered) > MOST_QUESTIONS:
            self._answered.popitem(last=False)

    def _settle(self, question: _Question) -> None:
        """Count the question, once. With leases still open it waits for the last of them."""
        if question.open_leases:
            question.settled = True
            return
        tally = self.tally
        tally.questions += 1
        tally.asked_pages += question.pages
        total = question.tokens(question.pages)
        tally.asked_tokens += total
        for layer in range(LAYERS):
            tally.pages[layer] += question.hits[layer]
            tally.tokens[layer] += question.hit_tokens[layer]
        tally.pages[LAYERS] += question.pages - sum(question.hits)
        tally.tokens[LAYERS] += total - sum(question.hit_tokens)


def _to_the_last_hit(tiers: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """What is kept is no longer than what was found."""
    if len(tiers) and tiers[-1] == MISS:
        there = np.flatnonzero(tiers != MISS)
        return tiers[: there[-1] + 1 if there.size else 0].copy()
    return tiers
