"""What a ``Client`` answers: plain frozen results, one explicit code per page."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.results import DeleteStatus, PinStatus, PutStatus


class Stored(IntEnum):
    """What became of one page of a ``put``: the codes of ``PutStatus``, and the client's own."""

    STORED = PutStatus.OFFERED
    EXISTS = PutStatus.EXISTS
    REFUSED_VALUE = PutStatus.REFUSED_VALUE
    REFUSED_SPACE = PutStatus.REFUSED_SPACE
    BUSY = PutStatus.BUSY
    REFUSED_CLOSED = PutStatus.REFUSED_CLOSED
    REFUSED_QUOTA = PutStatus.REFUSED_QUOTA
    LOST = 100
    """The reservation was gone at the commit (it expired, or the agent restarted)."""
    NO_AGENT = 101
    """No agent, no answer in time, or it refused the whole call."""


class Pinned(IntEnum):
    """What became of one page of a ``pin``: the codes of ``PinStatus``, and the client's own."""

    PINNED = PinStatus.PINNED
    ABSENT = PinStatus.ABSENT
    REFUSED_SPACE = PinStatus.REFUSED_SPACE
    REFUSED_LIMIT = PinStatus.REFUSED_LIMIT
    NO_AGENT = 101
    """No agent, no answer in time, or it refused the whole call."""
    UNSUPPORTED = 102
    """The agent is of a release that knows no pins."""


class Deleted(IntEnum):
    """What became of one page of a ``delete``: the codes of ``DeleteStatus``, and the client's."""

    DELETED = DeleteStatus.DELETED
    MARKED = DeleteStatus.MARKED
    ABSENT = DeleteStatus.ABSENT
    NO_AGENT = Pinned.NO_AGENT
    UNSUPPORTED = Pinned.UNSUPPORTED


@dataclass(frozen=True, eq=False)
class Lookup:
    """``tiers``: where each page is, uint8[n], 255 = nowhere. ``prefix``: pages there without a
    gap. ``load``: how many of them to load (the gate's answer, 0 = recompute all); ``reason``."""

    tiers: NDArray[np.uint8]
    prefix: int
    load: int
    reason: str = ""


@dataclass(frozen=True, eq=False)
class PutResult:
    """``status``: a ``Stored`` code for each page, uint8[n]."""

    status: NDArray[np.uint8]

    @property
    def stored(self) -> int:
        """How many pages are new in the cache."""
        return int(np.count_nonzero(self.status == Stored.STORED))


@dataclass
class ClientCounters:
    """What this client met since it was made."""

    connects: int = 0
    timeouts: int = 0
    refusals: int = 0
    losses: int = 0
    bad_pages: int = 0
    last_error: str = ""
    by_code: dict[str, int] = field(default_factory=dict)
