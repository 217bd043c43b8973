"""Which condition reason an error of the tiers is."""

from __future__ import annotations

from kvtier_api.reasons import Reason

from kvtier_agent.storage.core import CoreError

__all__ = ["reason_of"]


def reason_of(error: CoreError) -> Reason:
    return Reason.OutOfMemory
