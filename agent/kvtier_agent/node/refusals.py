"""Which condition reason an error of the tiers is."""

from __future__ import annotations

from kvtier_api.reasons import Reason

from kvtier_agent.storage.core import CoreError

__all__ = ["reason_of"]


def reason_of(error: CoreError) -> Reason:
    """The reason that the error carries; one that the API does not know is lack of memory, which
    is what is left when no volume is to blame."""
    said = str(getattr(error, "reason", ""))
    return Reason[said] if said in Reason.__members__ else Reason.OutOfMemory
