"""kopf, used as an informer and for the life of the process. The only module that imports it.

Only ``on.event`` handlers: they cost no write, no finalizer and no annotation on users' objects. A
handler puts what it got into the store and the keys that this concerns into the queue, and
returns; no decision is made here. No ``kopf.index``: it is quadratic on a cold start.

Some errors end a watch for good: a 404 because the CRD was removed, an error inside the stream.
The process then ends, and that is meant: all state is in the cluster, and a restart, which waits
for the CRDs, is the cleanest way to get back in step. kopf's own way to the end is not used,
because then it has none: its other watches wait for a login that nobody makes (`runtime.ending`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, cast

import aiohttp
import kopf
from kubernetes.aio import client as kubernetes_client

from kvtier_operator.observe.store import CACHE_NODES, NODES, POLICIES
from kvtier_operator.runtime.tap import TappedSession
from kvtier_operator.settings import OperatorSettings

__all__ = ["WatchEnded", "run_informer"]

OnEvent = Callable[[str, str | None, Mapping[str, Any]], None]


class WatchEnded(Exception):
    """A watch has ended for good, and kopf with it; the message says what kopf said."""


async def run_informer(
    settings: OperatorSettings,
    api: kubernetes_client.ApiClient,
    make_session: Callable[[], TappedSession],
    on_event: OnEvent,
    started: Callable[[], None],
) -> None:
    """Run kopf until cancelled. Raises `WatchEnded` as soon as one of its tasks ends. Either way
    the tasks that kopf has started, and the sessions, are left to the caller to end.

    ``on_event(kind, type, object)``: type is None for what a list brought, else ADDED, MODIFIED or
    DELETED. ``make_session`` is called at each login, ``started`` when kopf has started its tasks
    and put its signal handlers in place of all others."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)  # type: ignore[untyped-decorator]
    async def login(**_: Any) -> kopf.AiohttpSession:
        session = cast(aiohttp.ClientSession, make_session())
        return kopf.AiohttpSession(server=api.configuration.host, aiohttp_session=session)

    def watch(group: str, version: str, kind: str) -> None:
        @kopf.on.event(group, version, kind, registry=registry, id=kind)  # type: ignore[untyped-decorator]
        async def handle(event: Mapping[str, Any], **_: Any) -> None:
            on_event(kind, event.get("type"), event["object"])

    watch("kvtier.io", "v1alpha1", POLICIES)
    watch("kvtier.io", "v1alpha1", CACHE_NODES)
    watch("", "v1", NODES)
    roots = await kopf.spawn_tasks(
        registry=registry,
        settings=kopf_settings(settings),
        clusterwide=True,
        standalone=True,
    )
    started()
    done, _ = await asyncio.wait(roots, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        error = task.exception()
        if error is not None:
            raise WatchEnded(str(error) or type(error).__name__) from error
    raise WatchEnded(f"kopf has ended: {', '.join(task.get_name() for task in done)}")


def kopf_settings(settings: OperatorSettings) -> kopf.OperatorSettings:
    """kopf's own knobs; the reasons are measured ones."""
    ours = kopf.OperatorSettings()
    ours.peering.standalone = True  # another operator's default peering must not freeze this one
    ours.scanning.disabled = True  # kinds are fixed; no watch of all CRDs
    ours.posting.enabled = False  # events are ours
    # Without a limit each object keeps its worker for idle_timeout; short, so that thousands of
    # objects do not hold thousands of tasks.
    ours.queueing.worker_limit = 64
    ours.queueing.idle_timeout = 0.05
    ours.watching.server_timeout = settings.watch_timeout_seconds  # an int: a float is a 400
    ours.watching.client_timeout = settings.watch_timeout_seconds + 30
    ours.watching.inactivity_timeout = settings.watch_inactivity_seconds
    ours.watching.connect_timeout = settings.connect_timeout_seconds
    ours.watching.chunk_size = 500
    ours.networking.request_timeout = settings.request_timeout_seconds
    ours.networking.connect_timeout = settings.connect_timeout_seconds
    return ours
