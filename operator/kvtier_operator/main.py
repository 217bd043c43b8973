"""The operator process: wiring, in the order in which things start and end.

1. probes, so that the kubelet sees a live process at once;
2. wait for the API server and the CRDs;
3. the reconciler, which waits for the first lists;
4. kopf, which brings them, and runs until SIGTERM or an error of a watch.

Whatever ends first ends the process: a reconciler that died must not leave an informer behind that
looks healthy. A restart is normal and loses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from kvtier_operator.runtime.http import serve
from kvtier_operator.runtime.informer import run_informer
from kvtier_operator.runtime.queue import QueueLimits, QueueState, WorkQueue
from kvtier_operator.runtime.readiness import wait_until_ready
from kvtier_operator.runtime.reconciler import Reconciler
from kvtier_operator.runtime.tap import TappedSession
from kvtier_operator.settings import OperatorSettings

__all__ = ["StartError", "main", "run"]

log = get_logger("main")


class StartError(Exception):
    """The process cannot start; the message says what to do."""


class Operator:
    """The parts of one process, wired."""

    def __init__(self, settings: OperatorSettings, api: Any) -> None:
        self.settings = settings
        self.api = api
        self.metrics = Metrics()
        self.freshness = Freshness(KINDS, time.monotonic)
        self.store = Store(lambda: self.freshness.seen(CACHE_NODES), time.time)
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
        self.waiting = True
        self._gauges()

    def session(self) -> TappedSession:
        """A session for kopf."""
        return TappedSession(self.api, self.freshness, self.reconciler.on_list)

    def health(self) -> tuple[bool, Mapping[str, Any]]:
        """Red when a watch has been silent for so long that only a restart helps."""
        return self._report(self.settings.live_watch_age_seconds, alive_while_waiting=True)

    def readiness(self) -> tuple[bool, Mapping[str, Any]]:
        """Red before the first lists, and while a watch is silent or writes cannot be made."""
        well, details = self._report(
            self.settings.ready_watch_age_seconds, alive_while_waiting=False
        )
        reconciler = self.reconciler
        well = well and reconciler.synced and reconciler.reachable and not reconciler.forbidden
        return well, {**details, "ok": well}

    def _report(self, limit: float, *, alive_while_waiting: bool) -> tuple[bool, Mapping[str, Any]]:
        ages = self.freshness.ages()
        if self.waiting:
            well = alive_while_waiting
        else:
            well = all(age is not None and age <= limit for age in ages.values())
        return well, {
            "ok": well,
            "waitingForAPIServer": self.waiting,
            "synced": self.reconciler.synced,
            "apiServerReachable": self.reconciler.reachable,
            "objectsThatMayNotBeWritten": self.reconciler.forbidden,
            "secondsSinceWatchWasHeard": {
                kind: None if age is None else round(age, 1) for kind, age in ages.items()
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


async def run(settings: OperatorSettings) -> None:
    """Run until SIGTERM. Raises `StartError` for a user's mistake."""
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
        await operator.client.close()
        raise StartError(
            f"cannot listen on {settings.http}: {e.strerror or e}; give another --http HOST:PORT"
        ) from e
    address = server.sockets[0].getsockname()
    log.info("started", api=api.configuration.host, http=f"{address[0]}:{address[1]}")
    try:
        await _run_parts(operator)
    finally:
        server.close()
        await operator.client.close()


async def _run_parts(operator: Operator) -> None:
    loop = asyncio.get_running_loop()
    waiting = asyncio.create_task(wait_until_ready(operator.client), name="wait")
    # kopf puts its own handlers in place of these when it starts.
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, waiting.cancel)
    try:
        await waiting
    except asyncio.CancelledError:
        return
    operator.waiting = False
    reconciling = asyncio.create_task(operator.reconciler.run(), name="reconciler")
    await asyncio.sleep(0)  # so that kopf finds it there, and leaves it alone when it ends
    informing = asyncio.create_task(
        run_informer(
            operator.settings, operator.api, operator.session, operator.reconciler.on_event
        ),
        name="informer",
    )
    done, pending = await asyncio.wait(
        (reconciling, informing), return_when=asyncio.FIRST_COMPLETED
    )
    for task in pending:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*pending, return_exceptions=True)
    for task in done:
        task.result()


def main(settings: OperatorSettings) -> int:
    """Exit status: 0 after SIGTERM, 1 after an error, which is logged."""
    configure(settings.log_level)
    try:
        asyncio.run(run(settings))
    except StartError:
        raise
    except KeyboardInterrupt:
        return 0
    except Exception:
        log.exception("the operator ends; restarting it is safe")
        return 1
    finally:
        log.info("ended", pid=os.getpid())
    return 0
