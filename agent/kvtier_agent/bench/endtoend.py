"""`endtoend`: whole prompts stored and retrieved, as an engine does it.

Ours: hash the prompt's tokens into page keys, then `put` of all its pages; or `lookup`, `load` of
what the gate advises, verified copy, release. Baseline: a dict in this process from page key to a
row of memory that was touched before, with a numpy copy for each page; the keys are hashed in the
same way. It checks nothing, shares nothing and forgets everything with its process: what is left
between the two is the price of the agent.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.bench.errors import BenchError
from kvtier_agent.bench.figures import Figure, Spread, alternate, quantile
from kvtier_agent.bench.settings import EndToEndSettings
from kvtier_agent.bench.stand import Sizes, Stand, put_all, touched
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.identity import chain_keys
from kvtier_agent.server.client import Client

GB = 1e9
BASELINE = "numpy copy and a dict in one process"
ROUNDS_IN_ARENA = 3

Prompt = NDArray[np.uint32]


def pages_of_prompt(settings: EndToEndSettings) -> int:
    """Whole pages of a prompt; what does not fill a page is not stored. Raises `BenchError`."""
    pages = settings.prompt_tokens // settings.page_tokens
    if not pages:
        raise BenchError(
            f"a prompt of {settings.prompt_tokens} tokens fills no page of {settings.page_tokens};"
            " write a larger --prompt-tokens"
        )
    return pages


def sizes(settings: EndToEndSettings) -> Sizes:
    pages = ROUNDS_IN_ARENA * settings.prompts * pages_of_prompt(settings)
    return Sizes(dram=pages * settings.page_bytes)


def geometry(settings: EndToEndSettings) -> Geometry:
    """Raises ValueError where the page does not divide into its tokens."""
    return Geometry.of_page_bytes(settings.page_bytes, settings.page_tokens)


def run(stand: Stand, settings: EndToEndSettings, say: Callable[[str], None]) -> list[Figure]:
    """Figures `store` and `retrieve`. Raises `BenchError` and `AgentError`."""
    pages = pages_of_prompt(settings)
    source = touched(pages, settings.page_bytes)
    ours = _Ours(stand.client(), settings, source)
    bare = _Naive(settings, source)
    say("touching the arena")
    for side in (ours, bare):
        for _ in range(ROUNDS_IN_ARENA + 1):
            side.store()
        side.retrieve()
        side.check()
        side.forget_times()
    say(f"{settings.rounds} rounds of {settings.prompts} prompts of {pages} pages")
    stored, stored_bare = alternate(settings.rounds, ours.store, bare.store)
    got, got_bare = alternate(settings.rounds, ours.retrieve, bare.retrieve)
    ours.check()
    return [
        Figure(
            name, Spread.of(mine), Spread.of(baseline), BASELINE, "GB/s", True,
            {"p99_seconds": quantile(seconds, 0.99)},
        )
        for name, mine, baseline, seconds in (
            ("store", stored, stored_bare, ours.seconds[0]),
            ("retrieve", got, got_bare, ours.seconds[1]),
        )
    ]  # fmt: skip


class _Side:
    """Prompts through one of the two; `seconds[0]`, `[1]`: of each store and each retrieval."""

    def __init__(self, root: bytes, settings: EndToEndSettings, source: NDArray[np.uint8]) -> None:
        self.root = root
        self.settings = settings
        self.source = source
        self.target = np.zeros_like(source)
        self.seconds: tuple[list[float], list[float]] = ([], [])
        self._numbers = count()
        self._prompts: list[Prompt] = []

    def store(self) -> float:
        """New prompts, GB/s."""
        self._prompts = [self._new_prompt() for _ in range(self.settings.prompts)]
        return self._timed(0, self.store_one)

    def retrieve(self) -> float:
        """The prompts stored last, GB/s."""
        return self._timed(1, self.retrieve_one)

    def store_one(self, keys: NDArray[np.uint8]) -> None:
        raise NotImplementedError

    def retrieve_one(self, keys: NDArray[np.uint8]) -> None:
        raise NotImplementedError

    def check(self) -> None:
        """Raises `BenchError` when the last retrieval did not bring the bytes that were stored."""
        if not np.array_equal(self.source, self.target):
            raise BenchError("the bytes that came back are not those that were stored")

    def forget_times(self) -> None:
        for seconds in self.seconds:
            seconds.clear()

    def _new_prompt(self) -> Prompt:
        random = np.random.default_rng([3, next(self._numbers)])
        tokens = len(self.source) * self.settings.page_tokens
        return random.integers(0, 1 << 17, tokens, dtype=np.uint32)

    def _timed(self, which: int, one: Callable[[NDArray[np.uint8]], None]) -> float:
        total = 0.0
        for prompt in self._prompts:
            begin = time.perf_counter()
            one(chain_keys(self.root, prompt, self.settings.page_tokens))
            seconds = time.perf_counter() - begin
            self.seconds[which].append(seconds)
            total += seconds
        return len(self._prompts) * self.source.nbytes / GB / total


class _Ours(_Side):
    def __init__(
        self, client: Client, settings: EndToEndSettings, source: NDArray[np.uint8]
    ) -> None:
        super().__init__(client.root, settings, source)
        self._client = client

    def store_one(self, keys: NDArray[np.uint8]) -> None:
        put_all(self._client, keys, self.source)

    def retrieve_one(self, keys: NDArray[np.uint8]) -> None:
        found = self._client.lookup(keys, total_tokens=len(keys) * self.settings.page_tokens)
        if found.prefix != len(keys):
            raise BenchError(f"{len(keys) - found.prefix} stored pages were not found")
        with self._client.load(keys) as lease:
            if not lease.copy_to(self.target).all():
                raise BenchError("a stored page did not come back")


class _Naive(_Side):
    """A pool of rows used in turn, and a dict that says which row has which page."""

    def __init__(self, settings: EndToEndSettings, source: NDArray[np.uint8]) -> None:
        super().__init__(b"\0" * 16, settings, source)
        rows = ROUNDS_IN_ARENA * settings.prompts * len(source)
        self._pool = np.zeros((rows, settings.page_bytes), np.uint8)
        self._next = 0
        self._row: dict[bytes, int] = {}

    def store_one(self, keys: NDArray[np.uint8]) -> None:
        for i, key in enumerate(keys):
            np.copyto(self._pool[self._next], self.source[i])
            self._row[key.tobytes()] = self._next
            self._next = (self._next + 1) % len(self._pool)

    def retrieve_one(self, keys: NDArray[np.uint8]) -> None:
        for i, key in enumerate(keys):
            np.copyto(self.target[i], self._pool[self._row[key.tobytes()]])
