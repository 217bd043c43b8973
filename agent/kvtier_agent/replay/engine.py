"""One request through the cache, as a serving engine does it, with every byte checked.

    lookup the chain -> load what the gate says -> copy out, verify -> release -> put the rest

A page is a hit when it came with its checksum in order *and* its bytes are those that follow from
its key, and so did every page in front of it. Loading stops at the first page that is not; from
there on the request "recomputes", which here means: makes the pages anew and puts them.

Long prompts are loaded in groups of a few MiB: pages are pinned for as short as possible, and a
tier smaller than one prompt still serves it. Puts come right after the loads; there is no time
of computing between them unless the caller paces requests.

An engine that is refused for want of space goes on; so does this one when it is paced. Without
pace, minutes of traffic pass in a second and the moves between tiers, which would have had those
minutes, have not. So a run at full speed may be patient: it offers refused pages again for a
moment. The moment shrinks each time it was in vain, so that a cache which is really full costs no
time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtier_agent.cache.identity import KeyArray
from kvtier_agent.replay.content import Content
from kvtier_agent.replay.keys import ChainKeys
from kvtier_agent.replay.trace import Request
from kvtier_agent.server.client import AgentError, Client, Stored

GROUP_BYTES = 8 << 20
"""Bytes of pages loaded or put by one call; at most GROUP_PAGES of them."""
GROUP_PAGES = 512
LOAD_DEADLINE_MILLISECONDS = 10_000
"""A replay waits long for L2 rather than count a slow drive as a miss."""

FULL_SPEED_PATIENCE_SECONDS = 0.25
_LEAST_PATIENCE_SECONDS = 0.002
_FIRST_NAP_SECONDS = 0.001
_LONGEST_NAP_SECONDS = 0.016

Spoil = Callable[[npt.NDArray[np.uint8]], int]
"""Given loaded pages (n, page_bytes), overwrites some of them; returns how many. A self-test."""


@dataclass(slots=True)
class Outcome:
    """What one request got.

    Attributes:
        tiers: uint8[hits], where each page of the verified prefix was.
        wrong_pages, wrong_bytes: pages whose checksum was right and whose bytes were not.
        refused: pages that the cache did not take, by lower-case name of the reason.
        stored: pages that are new in the cache.
        failed: the agent gave no answer somewhere on the way; why.
    """

    tiers: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, dtype=np.uint8))
    wrong_pages: int = 0
    wrong_bytes: int = 0
    stored: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failed: str = ""


class Engine:
    """Asks one agent for one trace's pages.

    Args:
        client: made with `raise_errors=True`, so that no answer is not taken for a miss.
        content: what pages hold.
        block_tokens: tokens of a full page.
        patience_seconds: how long refused pages are offered again, 0 = not at all.
    """

    def __init__(
        self, client: Client, content: Content, block_tokens: int, patience_seconds: float = 0.0
    ) -> None:
        self.client = client
        self.content = content
        self.block_tokens = block_tokens
        self._most_patience = self._patience = patience_seconds
        self._group = max(1, min(GROUP_PAGES, GROUP_BYTES // content.page_bytes))
        self._buffer = np.empty((self._group, content.page_bytes), dtype=np.uint8)

    def run(self, request: Request, chain: ChainKeys, spoil: Spoil | None = None) -> Outcome:
        """One request from lookup to put. Never raises for what the agent does or does not do."""
        outcome = Outcome()
        keys = chain.of(request.hash_ids)
        if not len(keys):
            return outcome
        found: list[npt.NDArray[np.uint8]] = []
        try:
            self._load_prefix(request, keys, found, outcome, spoil)
            outcome.tiers = np.concatenate(found) if found else outcome.tiers
            self._put_rest(request, keys, chain.root, len(outcome.tiers), outcome)
        except AgentError as error:
            outcome.failed = str(error) or type(error).__name__
            outcome.tiers = np.concatenate(found) if found else outcome.tiers
        return outcome

    def _load_prefix(
        self,
        request: Request,
        keys: KeyArray,
        found: list[npt.NDArray[np.uint8]],
        outcome: Outcome,
        spoil: Spoil | None,
    ) -> None:
        looked = self.client.lookup(keys, total_tokens=request.input_length)
        done = 0
        while done < looked.load:
            group = keys[done : min(done + self._group, looked.load)]
            tiers = self._load(group, outcome, spoil)
            found.append(tiers)
            done += len(tiers)
            if len(tiers) < len(group):
                return

    def _load(self, keys: KeyArray, outcome: Outcome, spoil: Spoil | None) -> npt.NDArray[np.uint8]:
        """Load a group; the tiers of its verified prefix."""
        pages = self._buffer[: len(keys)]
        with self.client.load(keys, deadline_milliseconds=LOAD_DEADLINE_MILLISECONDS) as lease:
            tiers = lease.tier.copy()
            good = lease.copy_to(pages)
        there = int(np.argmin(good)) if not good.all() else len(keys)
        if spoil is not None and there:
            spoil(pages[:there])
        wrong = self.content.wrong(keys[:there], pages[:there])
        bad = np.flatnonzero(wrong)
        if bad.size:
            outcome.wrong_pages += int(bad.size)
            outcome.wrong_bytes += int(wrong.sum())
            there = int(bad[0])
        return tiers[:there]

    def _put_rest(
        self, request: Request, keys: KeyArray, root: bytes, start: int, outcome: Outcome
    ) -> None:
        """Put the pages from `start` on, in order."""
        while start < len(keys):
            end = min(start + self._group, len(keys))
            pages = self._buffer[: end - start]
            self.content.fill(keys[start:end], pages)
            status = self._put(request, keys, root, start, pages).copy()
            short = status == Stored.REFUSED_SPACE
            if short.any() and self._most_patience:
                # Space is refused from some page on: a chain with a hole is of no use.
                first = int(np.argmax(short))
                status[first:] = self._put_patiently(
                    request, keys, root, start + first, pages[first:], status[first:]
                )
            outcome.stored += int(np.count_nonzero(status == Stored.STORED))
            for code, count in zip(*np.unique(status, return_counts=True), strict=True):
                if code not in (Stored.STORED, Stored.EXISTS):
                    outcome.refused[Stored(int(code)).name.lower()] += int(count)
            start = end

    def _put(
        self,
        request: Request,
        keys: KeyArray,
        root: bytes,
        start: int,
        pages: npt.NDArray[np.uint8],
    ) -> npt.NDArray[np.uint8]:
        """Put `pages`, those of `keys` from `start` on; a status each."""
        end = start + len(pages)
        last = end == len(keys) and request.partial_last
        tokens = len(pages) * self.block_tokens
        return self.client.put(
            keys[start:end],
            pages,
            depth=start * self.block_tokens,
            tokens=tokens - self.block_tokens + request.last_tokens if last else tokens,
            partial_last=last,
            parent=keys[start - 1].tobytes() if start else root,
        ).status

    def _put_patiently(
        self,
        request: Request,
        keys: KeyArray,
        root: bytes,
        start: int,
        pages: npt.NDArray[np.uint8],
        status: npt.NDArray[np.uint8],
    ) -> npt.NDArray[np.uint8]:
        """Offer pages again that were refused for want of space; the last status of each."""
        final = status.copy()
        done = 0
        nap = _FIRST_NAP_SECONDS
        end = time.monotonic() + self._patience
        while done < len(pages) and time.monotonic() < end:
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_SECONDS)
            again = self._put(request, keys, root, start + done, pages[done:])
            short = again == Stored.REFUSED_SPACE
            taken = int(np.argmax(short)) if short.any() else len(again)
            # What was stored in an earlier round is there now: it keeps that status.
            final[done:] = again
            done += taken
            if taken:
                end = time.monotonic() + self._patience
        in_vain = done < len(pages)
        self._patience = (
            max(_LEAST_PATIENCE_SECONDS, self._patience / 2) if in_vain else self._most_patience
        )
        return final
