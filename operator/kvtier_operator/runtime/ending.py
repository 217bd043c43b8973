"""The end of the process, within a bound, whatever its parts do.

All state is in the cluster, so nothing has to be saved and nobody has to be waited for. But tasks
can swallow a cancellation: a watch of kopf whose pause waiter is cancelled first takes its own
cancellation for a pause, goes on, and waits for a login that nobody will make any more. So tasks
are cancelled again and again for a while, and a timer in a thread of its own ends the process in
case they, or the event loop itself, still do not.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final

from kvtier_operator.logs import get_logger

__all__ = ["Backstop", "end_tasks"]

log = get_logger("ending")

TASKS_SECONDS: Final = 5.0
"""How long tasks are cancelled for before they are left behind."""
EXIT_SECONDS: Final = 10.0
"""How long the whole end may take; well below the kubelet's 30 s before SIGKILL."""
AGAIN_SECONDS: Final = 0.1


async def end_tasks(
    tasks: Iterable[asyncio.Task[Any]], within: float = TASKS_SECONDS
) -> set[asyncio.Task[Any]]:
    """Cancel ``tasks``, again and again, for at most ``within`` seconds; those still running."""
    loop = asyncio.get_running_loop()
    # What callbacks of dying tasks complain about is of no use to anybody.
    loop.set_exception_handler(lambda _, said: log.debug("while ending", said=said.get("message")))
    running = {task for task in tasks if not task.done()}
    deadline = loop.time() + within
    while running and loop.time() < deadline:
        for task in running:
            task.cancel()
        done, running = await asyncio.wait(running, timeout=AGAIN_SECONDS)
        for task in done:
            if not task.cancelled():
                task.exception()  # seen: no complaint about it later
    return running


class Backstop:
    """Ends the process from a thread, ``seconds`` after the end has begun, unless disarmed."""

    def __init__(
        self, seconds: float = EXIT_SECONDS, leave: Callable[[int], None] = os._exit
    ) -> None:
        self._seconds = seconds
        self._leave = leave
        self._timer: threading.Timer | None = None

    def arm(self, status: int) -> None:
        """The end begins; if need be the process leaves with exit status ``status``."""
        if self._timer is None:
            self._timer = threading.Timer(self._seconds, self._fire, (status,))
            self._timer.daemon = True
            self._timer.start()

    def disarm(self) -> None:
        """The end came in good order."""
        if self._timer is not None:
            self._timer.cancel()

    def _fire(self, status: int) -> None:
        log.error("parts of the process do not end; leaving them behind", seconds=self._seconds)
        self._leave(status)
