"""Logs: one JSON object a line on standard error (or text for people), and no floods.

A line that is repeated word for word from the same place is written at most once in
`REPEAT_SECONDS`; the next one that is written says how many were left out (``repeated``). Values
may differ, the event's name counts: it is a fixed phrase, and what varies goes into fields.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, MutableMapping
from typing import Any, Final, Literal

import structlog

__all__ = ["Repeats", "configure"]

REPEAT_SECONDS: Final = 10.0
BURST: Final = 5
"""So many of one event pass within the window before the rest is counted instead."""
MOST_EVENTS: Final = 1024

Level = Literal["debug", "info", "warning", "error"]


class Repeats:
    """A structlog processor that drops and counts what is repeated."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[tuple[str, str], tuple[float, int, int]] = {}

    def __call__(
        self, logger: object, method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        now = self._clock()
        key = (method, str(event.get("event")))
        since, passed, dropped = self._seen.get(key, (now, 0, 0))
        if now - since >= REPEAT_SECONDS:
            since, passed = now, 0
        if passed >= BURST:
            self._seen[key] = (since, passed, dropped + 1)
            raise structlog.DropEvent
        if dropped:
            event["repeated"] = dropped
        if len(self._seen) >= MOST_EVENTS and key not in self._seen:
            self._seen.clear()  # event names are few; this only bounds a mistake
        self._seen[key] = (since, passed + 1, 0)
        return event


def configure(level: Level = "info", form: Literal["json", "text"] = "json") -> None:
    """Sets up structlog and the standard library's logging for this process, on stderr."""
    severity = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        Repeats(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if form == "json":
        ending: list[Any] = [
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(),
        ]
    else:
        ending = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    structlog.configure(
        processors=[*shared, *ending],
        wrapper_class=structlog.make_filtering_bound_logger(severity),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    # Libraries log through the standard library; theirs go the same way from warnings up.
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *ending],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(severity, logging.WARNING))
