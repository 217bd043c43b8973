"""The cache thread: the one thread that owns every cache, and never waits for anything but events.

It polls, in one place: the message socket of each trust domain, their lifelines, and an eventfd
that the mover's threads write when a move has ended and other threads when they posted a call.
Each round it serves what is there, hands new moves to the movers and goes back to the poll; the
cache's clock (``tick``) runs when something is due, at most every ``tick_seconds``.

    loop = CacheLoop(ServerSettings(run_dir))
    core = Core(settings, wake=loop.wake)
    loop.add(TrustDomain("default", core))
    loop.open()                                  # binds; ServerError on a user's mistake
    supervisor.start("cache", loop.run)
    loop.post(lambda: core.reconfigure(...)).result(5)
    ...
    supervisor.stop(); loop.close()

Other threads read ``loop.snapshot`` or ``post`` a callable; they never touch a cache. A loop that
died is started again by its supervisor with all its state: sockets and caches outlive the run.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

import structlog
import zmq

from kvtier_agent.server.channel import Channel
from kvtier_agent.server.pressure_log import PressureLog
from kvtier_agent.server.rundir import RunDir
from kvtier_agent.server.settings import ServerError, ServerSettings, TrustDomain
from kvtier_agent.server.snapshot import ServerSnapshot
from kvtier_agent.server.tracing import Tracing
from kvtier_agent.storage.left_behind import geometry_left
from kvtier_agent.supervise import Heart

log = structlog.get_logger("kvtier.server")

T = TypeVar("T")
LONGEST_POLL_SECONDS: Final = 0.5
CALLS_PER_ROUND: Final = 64


class CacheLoop:
    """See the module's story."""

    def __init__(
        self,
        settings: ServerSettings,
        clock: Callable[[], float] = time.monotonic,
        version: str = "",
    ) -> None:
        self.settings = settings
        self.boot = secrets.randbits(62) + 1
        """Random number of this process: leases and reservations of another one are void."""
        self.snapshot: ServerSnapshot | None = None
        """The latest figures; replaced, never changed. None before the first round."""
        self._clock = clock
        self._version = version
        self._domains: list[TrustDomain] = []
        self._channels: dict[str, Channel] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._poller = zmq.Poller()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._run_dir: RunDir | None = None
        self._tracing = Tracing()
        self._pressure = PressureLog()
        self._next_tick = 0.0
        self._next_snapshot = 0.0
        self._closed = False

    # -- any thread --------------------------------------------------------------------------------

    def wake(self) -> None:
        """End the poll: there is something to collect. Cheap, from any thread, at any time."""
        if not self._closed:
            os.eventfd_write(self._wake, 1)

    def post(self, call: Callable[[], T]) -> Future[T]:
        """Run ``call`` on the cache thread; its result or exception comes with the future."""
        future: Future[T] = Future()
        if self._closed:
            future.set_exception(ServerError("the agent is stopping"))
            return future
        self._calls.append((call, future))
        self.wake()
        return future

    # -- before the thread starts and after it ended ---------------------------------------------

    def add(self, domain: TrustDomain) -> None:
        """Serve this trust domain. Before ``open``."""
        self._domains.append(domain)

    def lock(self) -> None:
        """Lock the run folder, before anything else of this agent is made. ``ServerError``."""
        if self._run_dir is None:
            self._run_dir = RunDir(self.settings.run_dir)

    def open(self) -> None:
        """Lock the run folder and bind all sockets. ``ServerError``: one line for the user."""
        self.lock()
        self._poller.register(self._wake, zmq.POLLIN)
        try:
            for domain in self._domains:
                self._open_channel(domain)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let clients go and remove the sockets. The loop must have ended."""
        if self._closed:
            return
        self._closed = True
        now = self._clock()
        for channel in self._channels.values():
            channel.close(now)
        while self._calls:
            _, future = self._calls.popleft()
            future.set_exception(ServerError("the agent is stopping"))
        if self._run_dir is not None:
            self._run_dir.close(list(self._channels))
        self._context.destroy(linger=0)
        self._tracing.close()
        os.close(self._wake)

    # -- the thread --------------------------------------------------------------------------------

    def run(self, heart: Heart) -> None:
        """Serve until ``heart.stopping``; a target for ``Supervisor.start``."""
        while not heart.stopping.is_set():
            heart.beat()
            self.round(self._poll_seconds())

    def round(self, longest_seconds: float) -> None:
        """One poll and what it brought. (Tests drive the loop with it.)"""
        events = dict(self._poller.poll(max(0, int(longest_seconds * 1000 + 0.999))))
        now = self._clock()
        if events.pop(self._wake, 0):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            for channel in self._channels.values():
                channel.collect(now)
            self._run_calls()
        for channel in self._channels.values():
            self._serve(channel, events)
        now = self._clock()
        if now >= self._next_tick and self._due(now):
            self._next_tick = now + self.settings.tick_seconds
            for channel in self._channels.values():
                channel.tick(now)
        for channel in self._channels.values():
            channel.core.pump()
        if now >= self._next_snapshot:
            self._take_snapshot(now)

    def _serve(self, channel: Channel, events: dict[Any, int]) -> None:
        if events.pop(channel.socket, 0):
            channel.receive()
        if events.pop(channel.monitor, 0):
            channel.monitor_events()
        if not events:
            return
        if events.pop(channel.lifelines.listener.fileno(), 0):
            channel.lifelines.accept(self._clock())
        for descriptor in [d for d in events if channel.lifelines.holds(d)]:
            del events[descriptor]
            channel.lifeline_event(self._clock(), descriptor)

    def _run_calls(self) -> None:
        for _ in range(CALLS_PER_ROUND):
            if not self._calls:
                return
            call, future = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)
            self._next_snapshot = 0.0
        self.wake()

    def _due(self, now: float) -> bool:
        dues = [c.next_due() for c in self._channels.values()]
        return any(due is not None and due <= now for due in dues)

    def _poll_seconds(self) -> float:
        now = self._clock()
        until = self._next_snapshot
        for channel in self._channels.values():
            due = channel.next_due()
            if due is not None:
                until = min(until, max(due, self._next_tick))
        return min(LONGEST_POLL_SECONDS, max(0.0, until - now))

    def _take_snapshot(self, now: float) -> None:
        self._next_snapshot = now + self.settings.snapshot_seconds
        for channel in self._channels.values():
            channel.settle(now)
        self.snapshot = ServerSnapshot(
            now,
            self.boot,
            len(self._calls),
            {name: channel.figures(now) for name, channel in self._channels.items()},
        )
        for name, figures in self.snapshot.domains.items():
            l0 = figures.cache.tiers[0]
            self._pressure.look(name, figures.counters, l0.used_bytes, l0.capacity_bytes)

    def _open_channel(self, domain: TrustDomain) -> None:
        assert self._run_dir is not None
        channel = Channel(
            domain, self.settings, self.boot, self._run_dir, self._context,
            self._watch, self._unwatch, self._clock, self._tracing, self._version,
        )  # fmt: skip
        domain.core.on_outcome = channel.observe
        settings = domain.core.settings
        left = geometry_left(settings.volumes.values(), settings.domain)
        channel.dispatcher.expect(self._clock(), left)
        self._run_dir.show_table(domain.name, domain.core.settings.table_path)
        self._channels[domain.name] = channel
        self._poller.register(channel.socket, zmq.POLLIN)
        self._poller.register(channel.monitor, zmq.POLLIN)
        self._poller.register(channel.lifelines.listener.fileno(), zmq.POLLIN)

    def _watch(self, descriptor: int) -> None:
        self._poller.register(descriptor, zmq.POLLIN)

    def _unwatch(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError):
            self._poller.unregister(descriptor)
