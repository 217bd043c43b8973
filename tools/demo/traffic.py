"""Traffic on one node: an engine that lives through its share of the requests, and its figures.

Each node has a thread that plays a serving engine: it takes the requests that were routed to its
node, at the trace's pace times a factor, and runs each of them through the node's agent with the
replay's own engine, so that every byte that comes back is verified.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.replay.content import Content
from kvtier_agent.replay.engine import Engine
from kvtier_agent.replay.keys import ChainKeys
from kvtier_agent.replay.readings import settled_stats
from kvtier_agent.replay.trace import Request
from kvtier_agent.server.client import Client

PAGE_BYTES = 16384
BLOCK_TOKENS = 512
_GEOMETRY = Geometry.of_page_bytes(PAGE_BYTES, BLOCK_TOKENS, weights="demo")
_ASKED_AT_ONCE = 1024


@dataclass(slots=True)
class Figures:
    """Cumulative; a copy is handed out."""

    requests: int = 0
    failed: int = 0
    l0: int = 0
    l1: int = 0
    l2: int = 0
    miss: int = 0
    wrong_bytes: int = 0
    last_failure: str = ""

    @property
    def hits(self) -> int:
        return self.l0 + self.l1 + self.l2

    @property
    def blocks(self) -> int:
        return self.hits + self.miss

    def less(self, before: Figures) -> Figures:
        """What happened since `before`."""
        return Figures(
            self.requests - before.requests,
            self.failed - before.failed,
            self.l0 - before.l0,
            self.l1 - before.l1,
            self.l2 - before.l2,
            self.miss - before.miss,
            self.wrong_bytes - before.wrong_bytes,
            self.last_failure,
        )


@dataclass(frozen=True, slots=True)
class TierUse:
    """Bytes and pages of one tier of one node."""

    capacity: int = 0
    used: int = 0
    pages: int = 0

    @property
    def share(self) -> float:
        return self.used / self.capacity if self.capacity else 0.0


def _use(tier: Mapping[str, int]) -> TierUse:
    return TierUse(tier.get("capacity_bytes", 0), tier.get("used_bytes", 0), tier.get("pages", 0))


@dataclass(frozen=True, slots=True)
class Held:
    """Pages that an agent held at one moment: their keys, as bytes."""

    keys: frozenset[bytes] = field(default_factory=frozenset)


class NodeTraffic:
    """The engine of one node.

    Args:
        node: its name.
        socket: of its agent.
        requests: endless or not, in order of time.
        pace: trace seconds per second.
        seed: of the pages' content.
    """

    def __init__(
        self, node: str, socket: Path, requests: Iterator[Request], pace: float, seed: int
    ) -> None:
        self.node = node
        self._requests = requests
        self._pace = pace
        self._client = Client(socket, _GEOMETRY, timeout_seconds=5, name=node, raise_errors=True)
        # Asking what is held is no traffic: a probe's pages count as neither hit nor miss.
        self._probe = Client(socket, _GEOMETRY, timeout_seconds=5, name="demo", probe=True)
        self._engine = Engine(self._client, Content(PAGE_BYTES, seed), BLOCK_TOKENS)
        self._chain = ChainKeys(_GEOMETRY.fingerprint, node.encode())
        self._figures = Figures()
        self._full: dict[bytes, None] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._turn = threading.Lock()
        self._go_on = threading.Event()
        self._go_on.set()
        self._thread = threading.Thread(target=self._go, name=f"traffic-{node}", daemon=True)
        self.broken: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(20)
        self._client.close()
        self._probe.close()

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """The engine takes no new request inside; the one it is at is finished first."""
        self._go_on.clear()
        try:
            with self._turn:
                yield
        finally:
            self._go_on.set()

    def settle(self) -> None:
        """Wait until the agent has no page on its way between tiers (ten seconds at most)."""
        settled_stats(self._probe)

    def figures(self) -> Figures:
        """What this engine got so far."""
        with self._lock:
            return replace(self._figures)

    def tiers(self) -> tuple[TierUse, TierUse, TierUse]:
        """Use of L0, L1 and L2 now; zeros while the agent gives no answer."""
        found = self._probe.stats().get("tiers", {})
        l0, l1, l2 = (_use(found.get(name, {})) for name in ("hbm", "dram", "nvme"))
        return l0, l1, l2

    def held(self) -> Held:
        """Which of the full pages that were ever asked for the agent holds now.

        Pages of prompts' last, not full blocks are left out: those live in L0 only and go when
        they would have to leave it, whatever the policy.
        """
        with self._lock:
            keys = list(self._full)
        return Held(frozenset(self._present(keys)))

    def still_held(self, before: Held) -> Held:
        """Which of those pages the agent holds now."""
        return Held(frozenset(self._present(list(before.keys))))

    def _present(self, keys: Sequence[bytes]) -> Iterator[bytes]:
        for start in range(0, len(keys), _ASKED_AT_ONCE):
            part = keys[start : start + _ASKED_AT_ONCE]
            array = np.frombuffer(b"".join(part), dtype=np.uint8).reshape(-1, 16)
            tiers: npt.NDArray[np.uint8] = self._probe.lookup(array).tiers
            for index in np.flatnonzero(tiers != 255):
                yield part[int(index)]

    def _go(self) -> None:
        try:
            start = time.monotonic()
            first: float | None = None
            for request in self._requests:
                if first is None:
                    first = request.timestamp_milliseconds
                due = start + (request.timestamp_milliseconds - first) / 1000 / self._pace
                if self._stopping.wait(max(0.0, due - time.monotonic())):
                    return
                self._go_on.wait()
                with self._turn:
                    self._one(request)
        except Exception as error:  # the demo must see that its traffic has ended
            self.broken = error

    def _one(self, request: Request) -> None:
        outcome = self._engine.run(request, self._chain)
        by_tier = np.bincount(outcome.tiers, minlength=3)
        keys = self._chain.of(request.hash_ids)
        full = keys[:-1] if request.partial_last else keys
        with self._lock:
            figures = self._figures
            figures.requests += 1
            figures.l0 += int(by_tier[0])
            figures.l1 += int(by_tier[1])
            figures.l2 += int(by_tier[2])
            figures.miss += len(keys) - len(outcome.tiers)
            figures.wrong_bytes += outcome.wrong_bytes
            if outcome.failed:
                figures.failed += 1
                figures.last_failure = outcome.failed
            for key in full:
                self._full[key.tobytes()] = None


def route(requests: Sequence[Request], nodes: int) -> list[list[Request]]:
    """Split a trace over nodes as a cache-aware router does: a request goes where the longest part
    of its prompt already was, else where there is least work."""
    seen: list[set[int]] = [set() for _ in range(nodes)]
    work = [0] * nodes
    shares: list[list[Request]] = [[] for _ in range(nodes)]
    for request in requests:
        ids = request.hash_ids.tolist()
        known = [_leading(ids, blocks) for blocks in seen]
        best = max(range(nodes), key=lambda n: (known[n], -work[n]))
        if known[best] * 2 < len(ids):
            # Most of it is new, whatever head it shares with everybody: balance the load.
            best = min(range(nodes), key=lambda n: work[n])
        shares[best].append(request)
        seen[best].update(ids)
        work[best] += len(ids)
    return shares


def _leading(ids: Sequence[int], known: set[int]) -> int:
    count = 0
    for number in ids:
        if number not in known:
            break
        count += 1
    return count
