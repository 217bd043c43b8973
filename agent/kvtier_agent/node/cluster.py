"""The agent under Kubernetes: watch in, status out, on one event loop of its own thread.

It is one supervised loop. When it dies, the supervisor starts it again with a fresh connection and
a fresh list; nothing is carried over, because the object in the API server is all there is to know.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path
from typing import Final

import structlog

from kvtier_agent.node.control import Control
from kvtier_agent.node.interpret import (
    DEFAULT_GRACE_SECONDS,
    DEFAULT_INTERVAL_SECONDS,
    read_node,
)
from kvtier_agent.node.kube import NodeApi
from kvtier_agent.node.report import Build, Reporter
from kvtier_agent.node.watch import NodeWatch, Sighting
from kvtier_agent.supervise import Heart

__all__ = ["Cluster"]

BEAT_SECONDS: Final = 0.25
LAST_WORD_SECONDS: Final = 1.5
"""How long the last report ("stopping") may take."""

log = structlog.get_logger(__name__)


class Cluster:
    """Runs as a supervised loop. ``build``: the status to write, given the present one."""

    def __init__(
        self,
        node_name: str,
        kubeconfig: Path | None,
        control: Control,
        build: Build,
    ) -> None:
        self._node_name = node_name
        self._kubeconfig = kubeconfig
        self._control = control
        self._build = build
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reporter: Reporter | None = None
        self._guard = threading.Lock()
        self._interval = DEFAULT_INTERVAL_SECONDS
        self._grace = DEFAULT_GRACE_SECONDS
        self._known: bool | None = None
        self.watch: NodeWatch | None = None

    def check(self) -> None:
        """Raises `ConfigurationError` where there are no credentials to use."""

        async def open_and_close() -> None:
            api = await NodeApi.connect(self._kubeconfig)
            await api.close()

        asyncio.run(open_and_close())

    def wake(self) -> None:
        """The view changed: report soon. From any thread."""
        with self._guard:
            if self._loop is not None and self._reporter is not None:
                self._loop.call_soon_threadsafe(self._reporter.wake)

    def rival(self) -> str:
        """Boot id of another agent that reports for this node, or empty. From any thread."""
        reporter = self._reporter
        return "" if reporter is None else reporter.rival

    def run(self, heart: Heart) -> None:
        """Until the heart is asked to stop."""
        asyncio.run(self._main(heart))

    async def _main(self, heart: Heart) -> None:
        api = await NodeApi.connect(self._kubeconfig)
        reporter = Reporter(api, self._node_name, self._build, lambda: self._interval)

        def publish(sighting: Sighting) -> None:
            self._heard(sighting)
            reporter.saw(sighting)

        self.watch = NodeWatch(api, self._node_name, publish)
        with self._guard:
            self._loop, self._reporter = asyncio.get_running_loop(), reporter
        tasks = [asyncio.create_task(self.watch.run()), asyncio.create_task(reporter.run())]
        try:
            while not heart.stopping.is_set():
                heart.beat()
                done, _ = await asyncio.wait(tasks, timeout=BEAT_SECONDS)
                for task in done:
                    task.result()  # neither ends by itself: raises what ended it
        finally:
            with self._guard:
                self._loop = self._reporter = None
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if heart.stopping.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reporter.last_word(), LAST_WORD_SECONDS)
            await api.close()

    def _heard(self, sighting: Sighting) -> None:
        """On the event loop's thread: hand the newest word to the control."""
        word = read_node(sighting.body, self._grace)
        self._interval, self._grace = word.interval_seconds, word.grace_seconds
        exists = sighting.body is not None
        if exists != self._known:
            self._known = exists
            if exists:
                log.info("node object seen", node=self._node_name)
            else:
                log.warning(
                    "no KVTierNode of this name; the operator makes it once a policy selects the "
                    "node",
                    node=self._node_name,
                )
        self._control.say(word.desired, word.problem, word.generation)
