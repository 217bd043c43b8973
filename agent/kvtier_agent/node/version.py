"""The version that hello, status and logs say."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

__all__ = ["agent_version"]


@cache
def agent_version() -> str:
    try:
        return version("kvtier")
    except PackageNotFoundError:
        return "unknown"
