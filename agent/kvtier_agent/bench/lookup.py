"""`lookup`: the round trip of one lookup of many keys, and its latency with several clients.

Ours: `Client.lookup` of keys that are all there, from one client, the agent otherwise idle; the
figure is the median latency of the rounds' medians. Baseline: `dict_server`, the same keys through
a plain DEALER socket. `p99_seconds` of the first result is of the idle agent; the second result is
the p99 of one client while the others ask as fast as they can.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Final

import numpy as np
import zmq
from numpy.typing import NDArray

from kvtier_agent.bench.dict_server import ADD, LOOK_UP, THERE
from kvtier_agent.bench.errors import BenchError
from kvtier_agent.bench.figures import Figure, Spread, alternate, quantile
from kvtier_agent.bench.settings import LookupSettings
from kvtier_agent.bench.stand import Sizes, Stand, parse_last_line, put_all, random_keys, touched
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.server.client import Client

PAGE_BYTES: Final = 4096
GEOMETRY: Final = Geometry.of_page_bytes(PAGE_BYTES, 256)
CHAIN: Final = 1024
"""Pages of one put while the cache is filled."""
HELPER_SECONDS: Final = 30.0
"""How long another process may take to start."""


def sizes(settings: LookupSettings) -> Sizes:
    return Sizes(dram=(_pages(settings) + 2 * CHAIN) * PAGE_BYTES)


def run(stand: Stand, settings: LookupSettings, say: Callable[[str], None]) -> list[Figure]:
    """Figures `roundtrip_<keys>` and `..._<clients>_clients`. `BenchError`, `AgentError`."""
    client = stand.client()
    pages = _pages(settings)
    say(f"storing {pages} pages")
    data, every = touched(CHAIN, PAGE_BYTES), _all_keys(pages)
    for first in range(0, pages, CHAIN):
        keys = every[first : first + CHAIN]
        put_all(client, keys, data[: len(keys)])
    with _DictClient(stand, pages) as bare:
        ours, theirs = _Asking(client, settings), _Asking(bare, settings)
        for side in (ours, theirs):
            side.round()
            side.latencies.clear()
        say(f"{settings.rounds} rounds of {settings.calls} lookups of {settings.keys} keys")
        mine, baseline = alternate(settings.rounds, ours.round, theirs.round)
    name = f"roundtrip_{settings.keys}"
    idle = Figure(
        name, Spread.of(mine), Spread.of(baseline), "pyzmq ROUTER/DEALER with a dict",
        "seconds", False, {"p99_seconds": quantile(ours.latencies, 0.99)},
    )  # fmt: skip
    if settings.clients < 2:
        return [idle]
    say(f"the same with {settings.clients} clients at once")
    p99, p50 = _under_load(stand, client, settings)
    busy = Figure(
        f"{name}_{settings.clients}_clients", Spread.of(p99), None,
        f"p99 while {settings.clients} clients ask as fast as they can", "seconds", False,
        {"p99_seconds": median(p99), "p50_seconds": median(p50)},
    )  # fmt: skip
    return [idle, busy]


def windows(pages: int, keys: int, number: int) -> Iterator[NDArray[np.uint8]]:
    """Parts of the pages' keys, (keys, 16), contiguous, without end; for each number others."""
    every = _all_keys(pages)
    places = max(1, pages - keys + 1)
    for i in count(number):
        start = i * 7919 % places  # a prime: no window is met again soon
        yield np.ascontiguousarray(every[start : start + keys])


def _all_keys(pages: int) -> NDArray[np.uint8]:
    return random_keys((2,), pages)


def _pages(settings: LookupSettings) -> int:
    return max(settings.pages, settings.keys)


class _Asking:
    """One side of the comparison: who is asked, and every latency seen."""

    def __init__(self, client: Client | _DictClient, settings: LookupSettings) -> None:
        self._client = client
        self._settings = settings
        self._windows = windows(_pages(settings), settings.keys, 0)
        self.latencies: list[float] = []

    def round(self) -> float:
        """Seconds, the median of one round's lookups."""
        found = []
        for _ in range(self._settings.calls):
            asked = next(self._windows)
            begin = time.perf_counter()
            answer = self._client.lookup(asked)
            found.append(time.perf_counter() - begin)
            if answer.prefix != len(asked):
                raise BenchError(f"{len(asked) - answer.prefix} stored pages were not found")
        self.latencies += found
        return median(found)


def _under_load(
    stand: Stand, client: Client, settings: LookupSettings
) -> tuple[list[float], list[float]]:
    """Per round the p99 and the p50 of one client while the others ask, seconds."""
    names = [f"asker-{i}" for i in range(1, settings.clients)]
    arguments = [str(_pages(settings)), str(settings.keys)]
    words = [sys.executable, "-m", "kvtier_agent.bench.asker", str(stand.agent.socket)]
    try:
        for number, name in enumerate(names, 1):
            log = stand.help_out(name, [*words, *arguments, str(number)])
            _wait_ready(log, name)
        side = _Asking(client, settings)
        p99, p50 = [], []
        for _ in range(settings.rounds):
            side.latencies.clear()
            p50.append(side.round())
            p99.append(quantile(side.latencies, 0.99))
    finally:
        for name in names:
            stand.end_help(name)
    return p99, p50


def _wait_ready(log: Path, name: str) -> None:
    end = time.monotonic() + HELPER_SECONDS
    while parse_last_line(log) is None:
        if time.monotonic() > end:
            raise BenchError(f"{name} did not start within {HELPER_SECONDS:g} s")
        time.sleep(0.02)


class _Found:
    """The answer of the dict, as far as it is compared with ours."""

    def __init__(self, answer: bytes) -> None:
        missing = np.flatnonzero(np.frombuffer(answer, np.uint8) != THERE)
        self.prefix = int(missing[0]) if missing.size else len(answer)


class _DictClient:
    """A DEALER socket to a `dict_server` that holds the same keys."""

    def __init__(self, stand: Stand, pages: int) -> None:
        path = stand.agent.folder / "dict.sock"
        self._stand = stand
        stand.help_out("dict", [sys.executable, "-m", "kvtier_agent.bench.dict_server", str(path)])
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"ipc://{path}")
        self._ask(ADD, _all_keys(pages))

    def lookup(self, keys: NDArray[np.uint8]) -> _Found:
        return _Found(self._ask(LOOK_UP, keys))

    def _ask(self, order: bytes, keys: NDArray[np.uint8]) -> bytes:
        self._socket.send_multipart([order, keys.data])
        if not self._socket.poll(int(HELPER_SECONDS * 1000)):
            raise BenchError("the baseline's process does not answer")
        answer: bytes = self._socket.recv()
        return answer

    def __enter__(self) -> _DictClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._context.destroy(linger=0)
        self._stand.end_help("dict")
