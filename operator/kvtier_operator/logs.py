"""Logs: one JSON object a line on standard error, kopf's own lines included."""

from __future__ import annotations

import logging
import sys

import structlog

__all__ = ["configure", "get_logger"]


def configure(level: str = "info") -> None:
    """Route structlog and the standard library's loggers through one JSON renderer."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # kopf says at INFO that every single handler succeeded: thousands of lines that say nothing.
    for noisy in ("kopf", "asyncio", "aiohttp"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
    logging.getLogger("kopf.objects").setLevel(logging.ERROR)
    if level != "debug":
        # How a task of kopf ended is what this process ends with, and says, itself.
        for twice in ("orchestration", "running"):
            logging.getLogger(f"kopf._core.reactor.{twice}").setLevel(logging.CRITICAL)


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger of this package; ``name`` without the package's prefix."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(f"kvtier_operator.{name}")
    return logger
