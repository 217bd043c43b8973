"""The operator process: wiring, in the order in which things start and end.

1. probes, so that the kubelet sees a live process at once;
2. wait for the API server and the CRDs;
3. the reconciler, which waits for the first lists;
4. kopf, which brings them, and runs until SIGTERM or an error that ends a watch.

Whatever ends first ends the process, within seconds (`runtime.ending`): a reconciler that died must
not leave an informer behind that looks healthy, nor a watch that died a reconciler. A restart is
normal and loses nothing.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Mapping
from typing import Any

from kvtier_operator.apply.client import Client
from kvtier_operator.apply.connection import ConfigurationError, connect
from kvtier_operator.logs import configure, get_logger
from kvtier_operator.metrics import CONTENT_TYPE, Metrics
from kvtier_operator.observe.freshness import Freshness
from kvtier_operator.observe.store import CACHE_NODES, KINDS, Key, Store
from kvtier_operator.runtime.ending import Backstop, end_tasks
from kvtier_operator.runtime.http import serve
from kvtier_operator.runtime.informer import WatchEnded, run_informer
from kvtier_operator.runtime.obstacles import Obstacles
from kvtier_operator.runtime.queue import QueueLimits, QueueState, WorkQueue
from kvtier_operator.runtime.readiness import wait_until_ready
from kvtier_operator.runtime.reconciler import Reconciler
from kvtier_operator.runtime.tap import TappedSession
from kvtier_operator.settings import OperatorSettings

__all__ = ["StartError", "main", "run"]

log = get_logger("main")
watch_log = get_logger("watch")


class StartError(Exception):
    """The process cannot start; the message says what to do."""


class Operator:
    """The parts of one process, wired."""

    def __init__(self, settings: OperatorSettings, api: Any) -> None:
        self.settings = settings
        self.api = api
        self.metrics = Metrics()
        self.freshness = Freshness(KINDS, time.monotonic)
        self.obstacles = Obstacles(time.monotonic, watch_log.warning, watch_log.info)
        self.store = Store(lambda: self.freshness.seen(CACHE_NODES), time.time, time.monotonic)
        self.client = Client(
            api,
            request_timeout=settings.request_timeout_seconds,
            connect_timeout=settings.connect_timeout_seconds,
            on_write=self.metrics.wrote,
        )
        limits = QueueLimits(
            retry_base=settings.retry_base_seconds,
            retry_max=settings.retry_max_seconds,
            rate=settings.reconciles_per_second,
            burst=settings.reconcile_burst,
        )
        self.queue: WorkQueue[Key] = WorkQueue(
            QueueState(limits, urgent=lambda key: key[0] != "node", random=random.random),
            time.monotonic,
        )
        self.reconciler = Reconciler(
            settings,
            self.client,
            self.store,
            self.queue,
            self.freshness,
            self.metrics,
        )
        self._sessions: list[TappedSession] = []
        self.watching_since: float | None = None
        """Monotonic seconds; None while the API server and the CRDs are waited for."""
        self._gauges()

    def watch(self) -> None:
        """The API server and the CRDs are there: from now on silence counts."""
        self.watching_since = time.monotonic()

    def session(self) -> TappedSession:
        """A session for kopf."""
        session = TappedSession(self.api, self.freshness, self.obstacles, self.reconciler.on_list)
        self._sessions.append(session)
        return session

    async def close(self) -> None:
        """Close all connections to the API server."""
        for session in self._sessions:
            await session.close()
        await self.client.close()

    def health(self) -> tuple[bool, Mapping[str, Any]]:
        """Red when a watch has been silent for so long that only a restart helps."""
        limit, ages = self.settings.live_watch_age_seconds, self.freshness.ages()
        if self.watching_since is None:
            return True, self._details(True, limit)
        waited = time.monotonic() - self.watching_since
        well = all((waited if age is None else age) <= limit for age in ages.values())
        return well, self._details(well, limit)

    def readiness(self) -> tuple[bool, Mapping[str, Any]]:
        """Red before the first lists, and while a watch is silent or refused, or writes cannot be
        made."""
        limit, ages = self.settings.ready_watch_age_seconds, self.freshness.ages()
        reconciler = self.reconciler
        well = (
            all(age is not None and age <= limit for age in ages.values())
            and reconciler.synced
            and reconciler.reachable
            and not reconciler.forbidden
            and not self.obstacles.refused
        )
        return well, self._details(well, limit)

    def _details(self, well: bool, limit: float) -> Mapping[str, Any]:
        return {
            "ok": well,
            "waitingForAPIServer": self.watching_since is None,
            "synced": self.reconciler.synced,
            "apiServerReachable": self.reconciler.reachable,
            "objectsThatMayNotBeWritten": self.reconciler.forbidden,
            "watchesRefused": self.obstacles.refused,
            "secondsSinceWatchWasHeard": {
                kind: None if age is None else round(age, 1)
                for kind, age in self.freshness.ages().items()
            },
            "limitSeconds": limit,
        }

    def _gauges(self) -> None:
        self.metrics.watch(
            "kvtier_operator_watch_age_seconds",
            "Seconds since an event, bookmark or list arrived, by kind.",
            lambda: {k: a for k, a in self.freshness.ages().items() if a is not None},
        )
        self.metrics.watch(
            "kvtier_operator_objects",
            "Objects in the store, by kind.",
            lambda: {
                "kvtierpolicies": len(self.store.policies),
                "kvtiernodes": len(self.store.cache_nodes),
                "nodes": len(self.store.nodes),
            },
        )
        self.metrics.watch(
            "kvtier_operator_queue_keys",
            "Keys in the work queue: waiting (now or for later) and running.",
            lambda: {"waiting": len(self.queue.state), "running": self.queue.state.busy},
        )


async def run(settings: OperatorSettings, backstop: Backstop) -> None:
    """Run until SIGTERM. Raises `StartError` for a user's mistake, `WatchEnded` where a restart is
    needed."""
    try:
        api = await connect(settings.kubeconfig)
    except ConfigurationError as e:
        raise StartError(str(e)) from e
    operator = Operator(settings, api)
    host, port = settings.http_address
    try:
        server = await serve(
            host,
            port,
            health=operator.health,
            readiness=operator.readiness,
            metrics=operator.metrics.render,
            metrics_type=CONTENT_TYPE,
        )
    except OSError as e:
        await operator.close()
        raise StartError(
            f"cannot listen on {settings.http}: {e.strerror or e}; give another --http HOST:PORT"
        ) from e
    address = server.sockets[0].getsockname()
    log.info("started", api=api.configuration.host, http=f"{address[0]}:{address[1]}")
    try:
        await _run_parts(operator, backstop)
    finally:
        server.close()
        await operator.close()


async def _run_parts(operator: Operator, backstop: Backstop) -> None:
    others = asyncio.all_tasks()
    stop = asyncio.Event()

    def claim_signals() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)

    async def first_of(*parts: asyncio.Task[None]) -> bool:
        """Wait for one to end, and raise what it raised; False when the process is to stop."""
        done, _ = await asyncio.wait((stopping, *parts), return_when=asyncio.FIRST_COMPLETED)
        for task in () if stopping in done else done:
            task.result()
        return stopping not in done

    claim_signals()
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        if not await first_of(asyncio.create_task(wait_until_ready(operator.client), name="wait")):
            return
        operator.watch()
        reconciling = asyncio.create_task(operator.reconciler.run(), name="reconciler")
        informer = run_informer(
            operator.settings,
            operator.api,
            operator.session,
            operator.reconciler.on_event,
            started=claim_signals,  # kopf's own only cancel its tasks, and only once
        )
        await first_of(reconciling, asyncio.create_task(informer, name="informer"))
    except WatchEnded as e:
        raise WatchEnded(operator.obstacles.final or str(e)) from e
    finally:
        backstop.arm(0 if stop.is_set() else 1)
        await end_tasks(asyncio.all_tasks() - others)


def main(settings: OperatorSettings) -> int:
    """Exit status: 0 after SIGTERM, 1 after an error, which is logged."""
    configure(settings.log_level)
    backstop = Backstop()
    try:
        asyncio.run(run(settings, backstop))
    except StartError:
        raise
    except KeyboardInterrupt:
        return 0
    except WatchEnded as e:
        log.error("a watch has ended; the operator ends, restarting it is safe", reason=str(e))
        return 1
    except Exception:
        log.exception("the operator ends; restarting it is safe")
        return 1
    finally:
        backstop.disarm()
        log.info("ended", pid=os.getpid())
    return 0
