"""`memory`: what it costs another process to put pages into DRAM and to get them out again.

Ours: `Client.put` and `Client.load` + `copy_to` of a batch of pages, checksums included, against
one memcpy by one thread for each page, between the same buffers of this process and slots of the
same arena. The arena and all buffers were touched before; the tier is full, so each put replaces
older pages, as in service.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from itertools import count

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.bench.errors import BenchError
from kvtier_agent.bench.figures import Figure, Spread, alternate, quantile
from kvtier_agent.bench.settings import MemorySettings
from kvtier_agent.bench.stand import PAGE_TOKENS, Sizes, Stand, put_all, random_keys, touched
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.server.client import Client

GB = 1e9
BASELINE = "memcpy, one thread"
ROUNDS_IN_ARENA = 3
"""The arena holds the pages of this many rounds: those put, those replaced, and some slack."""


def sizes(settings: MemorySettings) -> Sizes:
    pages = max(ROUNDS_IN_ARENA * settings.pages, settings.pages + 4 * settings.batch)
    return Sizes(dram=pages * settings.page_bytes)


def geometry(settings: MemorySettings) -> Geometry:
    return Geometry.of_page_bytes(settings.page_bytes, PAGE_TOKENS)


def run(stand: Stand, settings: MemorySettings, say: Callable[[str], None]) -> list[Figure]:
    """Figures `put` and `get`. Raises `BenchError` and `AgentError`."""
    bench = _Memory(stand, stand.client(), settings)
    say("touching the arena")
    bench.warm_up()
    say(f"{settings.rounds} rounds of {settings.pages} pages of {settings.page_bytes} bytes")
    put, put_bare = alternate(settings.rounds, bench.put, bench.bare_put)
    get, get_bare = alternate(settings.rounds, bench.get, bench.bare_get)
    return [
        Figure("put", Spread.of(put), Spread.of(put_bare), BASELINE, "GB/s", True, bench.seen(0)),
        Figure("get", Spread.of(get), Spread.of(get_bare), BASELINE, "GB/s", True, bench.seen(1)),
    ]


class _Memory:
    """The four measurements; each returns GB/s over one round."""

    def __init__(self, stand: Stand, client: Client, settings: MemorySettings) -> None:
        self._stand = stand
        self._client = client
        self._settings = settings
        self._batches = -(-settings.pages // settings.batch)
        # A row for every page of a round: rows used again and again would come from the
        # processor's cache, which an engine's pages do not.
        self._source = touched(self._batches * settings.batch, settings.page_bytes)
        self._target = np.zeros_like(self._source)
        self._bytes = self._source.nbytes
        self._numbers = count()
        self._calls: tuple[list[float], list[float]] = ([], [])
        self._cpu = [0.0, 0.0]
        self._moved = [0, 0]
        self._stored: list[NDArray[np.uint8]] = []

    def warm_up(self) -> None:
        """Every slot of the arena is written and read once by this process."""
        slots = sizes(self._settings).dram // self._settings.page_bytes
        for _ in range(-(-slots // (self._batches * self._settings.batch)) + 1):
            self.put()
        self.get()
        self.bare_put()
        self.bare_get()
        if not np.array_equal(self._source, self._target):
            raise BenchError("the bytes that came back are not those that were stored")
        for calls in self._calls:
            calls.clear()
        self._cpu, self._moved = [0.0, 0.0], [0, 0]

    def put(self) -> float:
        keys = list(self._fresh())
        seconds = self._timed(0, keys, lambda k, rows: put_all(self._client, k, self._source[rows]))
        self._stored = keys
        return self._bytes / GB / seconds

    def get(self) -> float:
        return self._bytes / GB / self._timed(1, self._stored, self._load)

    def bare_put(self) -> float:
        """memcpy into slots that are reserved for the purpose and given back unused."""
        seconds = 0.0
        for number, keys in enumerate(self._fresh()):
            reservation = self._client.reserve(keys)
            try:
                if len(reservation.offered) != len(keys):
                    raise BenchError("the arena has no room for the baseline's pages")
                slots = [reservation.view(i).ctypes.data for i in range(len(keys))]
                seconds += self._memcpy(slots, _addresses(self._source[self._rows(number)]))
            finally:
                reservation.abort()
        return self._bytes / GB / seconds

    def bare_get(self) -> float:
        seconds = 0.0
        for number, keys in enumerate(self._stored):
            with self._client.load(keys) as lease:
                if lease.prefix != len(keys):
                    raise BenchError("a stored page is not there any more")
                slots = [lease.page(i).ctypes.data for i in range(len(keys))]
                seconds += self._memcpy(_addresses(self._target[self._rows(number)]), slots)
        return self._bytes / GB / seconds

    def seen(self, side: int) -> dict[str, float]:
        return {
            "cpu_seconds_per_gb": self._cpu[side] / (self._moved[side] / GB),
            "p99_seconds": quantile(self._calls[side], 0.99),
        }

    def _fresh(self) -> Iterator[NDArray[np.uint8]]:
        """Keys that nobody has asked for, a batch at a time."""
        for _ in range(self._batches):
            yield random_keys((1, next(self._numbers)), self._settings.batch)

    def _rows(self, number: int) -> slice:
        """Where the pages of a round's batch come from and go to."""
        return slice(number * self._settings.batch, (number + 1) * self._settings.batch)

    def _load(self, keys: NDArray[np.uint8], rows: slice) -> None:
        with self._client.load(keys) as lease:
            if not lease.copy_to(self._target[rows]).all():
                raise BenchError("a stored page did not come back")

    def _timed(
        self,
        side: int,
        batches: list[NDArray[np.uint8]],
        call: Callable[[NDArray[np.uint8], slice], None],
    ) -> float:
        """Seconds of all calls together."""
        cpu = self._stand.cpu_seconds()
        begin = last = time.perf_counter()
        for number, keys in enumerate(batches):
            call(keys, self._rows(number))
            now = time.perf_counter()
            self._calls[side].append(now - last)
            last = now
        self._cpu[side] += self._stand.cpu_seconds() - cpu
        self._moved[side] += self._bytes
        return last - begin

    def _memcpy(self, targets: list[int], sources: list[int]) -> float:
        size, copy = self._settings.page_bytes, ctypes.memmove
        begin = time.perf_counter()
        for target, source in zip(targets, sources, strict=True):
            copy(target, source, size)
        return time.perf_counter() - begin


def _addresses(rows: NDArray[np.uint8]) -> list[int]:
    return [rows.ctypes.data + i * rows.strides[0] for i in range(len(rows))]
