"""A run: a whole trace through one agent, at the trace's pace or as fast as it goes.

The driver owns the order of things and the clock; what one request does is `engine`, what is
counted is `accounting`, what the agent did meanwhile is read from its own counters before and
after (`readings`). Copies of the trace follow one another, each with keys of its own.

*Pace.* With a speed X, a request is sent when its time stamp divided by X has passed, or at once
when the run is late; without one nothing is waited for. Requests go one after the other.

*Self-tests.* `corrupt_client` overwrites one byte in that many loaded pages, spread over the run:
the check of bytes must report each of them. `corrupt_tier` flips bytes of that many stored pages
half-way through the run and asks for each at once (`faults`): none may be served, each must be
quarantined, and the rest of the run goes on over the damage.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.replay import faults
from kvtier_agent.replay.accounting import FLOPS_PARITY_TOKENS, Accounts, Totals
from kvtier_agent.replay.content import Content
from kvtier_agent.replay.engine import FULL_SPEED_PATIENCE_SECONDS, Engine, Spoil
from kvtier_agent.replay.errors import ReplayError
from kvtier_agent.replay.keys import ChainKeys
from kvtier_agent.replay.readings import Readings, read_agent
from kvtier_agent.replay.report import Report
from kvtier_agent.replay.trace import Request, Trace
from kvtier_agent.server.client import AgentError, Client

TIMEOUT_SECONDS = 5.0
"""Of one call to the agent."""

_POLICY_SECONDS = 300.0
"""How long an agent may take to put its policy in force: memory for large tiers takes a while."""

_LONGEST_SLEEP_SECONDS = 3600.0
"""The system takes no sleep of centuries, which a trace's time stamps can ask for."""

_PATIENCE = 20
"""So many requests in a row without an answer end the run."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a trace is replayed.

    Attributes:
        page_bytes: size of a page.
        speed: trace seconds per second; None = no waiting.
        copies: how often the trace is repeated, each time with other keys.
        parity_tokens: see `accounting`.
        corrupt_client, corrupt_tier: faults to plant, see the module's text.
        volumes: where the agent keeps L2, by name, for `corrupt_tier` to find its files.
        seed: of everything random; the content of pages too.
    """

    page_bytes: int
    speed: float | None = None
    copies: int = 1
    parity_tokens: float = FLOPS_PARITY_TOKENS
    corrupt_client: int = 0
    corrupt_tier: int = 0
    volumes: tuple[tuple[str, Path], ...] = ()
    seed: int = 0


class Watcher(Protocol):
    """Told how far a run is; `alive` lets it end the run early with a reason."""

    def advance(self, blocks: int, totals: Callable[[], Totals]) -> None: ...

    def alive(self) -> str:
        """Why the agent is gone for good, "" while it is not."""
        ...


class _Spoiler:
    """Plants faults in the buffers of one request, `quota` at most."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random
        self.quota = 0
        self.planted = 0

    def __call__(self, pages: npt.NDArray[np.uint8]) -> int:
        count = min(self.quota, len(pages))
        for row in self._random.choice(len(pages), size=count, replace=False):
            pages[row, self._random.integers(pages.shape[1])] ^= self._random.integers(
                1, 256, dtype=np.uint8
            )
        self.quota -= count
        self.planted += count
        return count


class _Run:
    """The moving parts of one replay."""

    def __init__(self, trace: Trace, client: Client, plan: Plan, watcher: Watcher) -> None:
        self.trace = trace
        self.client = client
        self.plan = plan
        self.watcher = watcher
        self.total = len(trace.requests) * plan.copies
        self.engine = Engine(
            client,
            Content(plan.page_bytes, plan.seed),
            trace.block_tokens,
            patience_seconds=FULL_SPEED_PATIENCE_SECONDS if plan.speed is None else 0.0,
        )
        self.accounts = Accounts(self.total, trace.block_tokens, plan.parity_tokens)
        self.random = np.random.default_rng(plan.seed)
        self.spoiler = _Spoiler(self.random)
        self.refused: Counter[str] = Counter()
        self.wrong_pages = self.wrong_bytes = self.failed = 0
        self.stored_faults: dict[int, int] = {}
        self._failed_in_a_row = 0

    def requests(self) -> Iterator[tuple[int, Request, ChainKeys, float]]:
        """Index, request, its copy's keys and its time stamp in seconds from the run's start."""
        index = 0
        first = self.trace.requests[0].timestamp_milliseconds
        length = self.trace.requests[-1].timestamp_milliseconds - first
        for copy in range(self.plan.copies):
            salt = f"replay-{self.plan.seed}-{copy}".encode()
            chain = ChainKeys(self.client.geometry.fingerprint, salt)
            for request in self.trace.requests:
                stamp = request.timestamp_milliseconds - first + copy * length
                yield index, request, chain, stamp / 1000
                index += 1

    def go(self) -> float:
        """Everything, start to end; seconds taken."""
        start = time.monotonic()
        for index, request, chain, stamp in self.requests():
            if self.plan.speed is not None:
                _wait_until(start + stamp / self.plan.speed)
            self._one(index, request, chain)
            if self.plan.corrupt_tier and index == self.total // 2:
                self.stored_faults = faults.corrupt_stored_pages(
                    self.client,
                    self.engine.content,
                    chain.known(),
                    self.plan.corrupt_tier,
                    volumes=dict(self.plan.volumes),
                    random=self.random,
                )
        return time.monotonic() - start

    def _one(self, index: int, request: Request, chain: ChainKeys) -> None:
        outcome = self.engine.run(request, chain, self._spoil(index))
        self.accounts.add(request, outcome.tiers)
        self.refused += outcome.refused
        self.wrong_pages += outcome.wrong_pages
        self.wrong_bytes += outcome.wrong_bytes
        if outcome.failed:
            self.failed += 1
            self._failed_in_a_row += 1
            gone = self.watcher.alive()
            if gone or self._failed_in_a_row >= _PATIENCE:
                raise ReplayError(gone or f"the agent does not answer: {outcome.failed}")
        else:
            self._failed_in_a_row = 0
        self.watcher.advance(len(request.hash_ids), self.accounts.totals)

    def _spoil(self, index: int) -> Spoil | None:
        left = self.plan.corrupt_client - self.spoiler.planted
        if left <= 0:
            return None
        # Twice as fast as an even spread: late requests make up for those that hit nothing.
        self.spoiler.quota = -(-2 * left // (self.total - index))
        return self.spoiler


def replay(trace: Trace, socket: Path, plan: Plan, watcher: Watcher) -> Report:
    """Replay `trace` through the agent at `socket`.

    Raises:
        ReplayError: the agent does not take this client, or is gone.
    """
    geometry = Geometry.of_page_bytes(plan.page_bytes, trace.block_tokens, weights="replay")
    with Client(
        socket, geometry, timeout_seconds=TIMEOUT_SECONDS, name="replay", raise_errors=True
    ) as client:
        _wait_connected(client, socket, watcher)
        _wait_admitting(client, watcher)
        try:
            before = read_agent(client)
            run = _Run(trace, client, plan, watcher)
            seconds = run.go()
            after = read_agent(client)
        except AgentError as error:
            raise ReplayError(watcher.alive() or f"the agent does not answer: {error}") from None
    return _report(run, plan, after - before, seconds)


def _wait_connected(client: Client, socket: Path, watcher: Watcher) -> None:
    """An agent may be busy or just starting; one that refuses has made up its mind."""
    end = time.monotonic() + TIMEOUT_SECONDS
    while not client.connected:
        # Asked first: a client can only say that nobody listens, which is true of a dead agent too.
        gone = watcher.alive()
        if gone:
            raise ReplayError(gone)
        if client.counters.refusals or not socket.exists() or time.monotonic() > end:
            raise ReplayError(
                f"no agent takes this replay at {socket}: {client.counters.last_error}"
            )
        time.sleep(0.02)


def _wait_admitting(client: Client, watcher: Watcher) -> None:
    """An agent listens before its policy is in force; until then it takes nothing in."""
    end = time.monotonic() + _POLICY_SECONDS
    why = "the agent has no policy in force; give it one"
    while True:
        try:
            if client.stats().get("admitting"):
                return
        except AgentError as error:
            why = f"the agent does not answer: {error}"
        gone = watcher.alive()
        if gone or time.monotonic() > end:
            raise ReplayError(gone or why)
        time.sleep(0.05)


def new_seed() -> int:
    """A seed that no other run has, so that no run meets pages of an earlier one."""
    return int.from_bytes(os.urandom(6), "little")


def _report(run: _Run, plan: Plan, did: Readings, seconds: float) -> Report:
    trace = run.trace
    planted: dict[str, int] = {}
    if plan.corrupt_client:
        planted |= {
            "client_buffers": run.spoiler.planted,
            "client_buffers_asked": plan.corrupt_client,
        }
    if plan.corrupt_tier:
        planted |= {
            "stored_pages": sum(run.stored_faults.values()),
            "stored_pages_asked": plan.corrupt_tier,
        }
        planted |= {f"stored_pages_l{tier}": n for tier, n in run.stored_faults.items()}
    return Report(
        requests=run.total,
        blocks=trace.blocks * plan.copies,
        tokens=trace.tokens * plan.copies,
        whole=run.accounts.totals(),
        second_half=run.accounts.second_half(),
        pages_written=did.pages_written,
        bytes_written=did.bytes_written,
        evictions=did.evictions,
        dropped=did.dropped,
        latency=did.latency,
        wrong_pages=run.wrong_pages,
        wrong_bytes=run.wrong_bytes,
        planted=planted,
        quarantined=did.quarantined,
        failed_requests=run.failed,
        refused=dict(run.refused),
        seconds=seconds,
        bad_line_count=trace.bad_line_count,
        bad_lines=tuple(str(bad) for bad in trace.bad_lines[:20]),
        settings={
            "page_bytes": plan.page_bytes,
            "block_tokens": trace.block_tokens,
            "speed": plan.speed or "max",
            "copies": plan.copies,
            "flops_parity_tokens": plan.parity_tokens,
            "seed": plan.seed,
        },
    )


def _wait_until(moment: float) -> None:
    while (left := moment - time.monotonic()) > 0:
        time.sleep(min(left, _LONGEST_SLEEP_SECONDS))
