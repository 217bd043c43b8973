"""How long each watch has been silent, and a clock that stands still while the operator is blind.

A watch is *heard* with every byte that arrives on it: events and the API server's bookmarks (about
one a minute), and with every list. The age of the last sign is what the probes report: a process
whose watch died quietly looks healthy from everywhere else.

Nodes are judged stale by *seen time*: it moves only up to the last sign of the KVTierNode watch,
and time between the loss of a connection and the next one does not count. An API server that was
away for a minute therefore makes no node stale: what could not be seen is not judged.

Connections can outlive what is behind them: while the API server's storage hangs nobody can report,
and no watch ends. The first report afterwards would find all other nodes long silent. So a gap of
`GAP_SECONDS` between two signs is left out of judgement for `HOLD_SECONDS`, in which agents come
back from their back-off (8 s at most). The hold is shorter than the gap, so that signs which are
always that far apart cannot put off judgement for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

__all__ = ["Freshness"]

GAP_SECONDS: Final = 15.0
"""More than the least report interval: one live agent is enough to leave no such gap."""
HOLD_SECONDS: Final = 10.0


class Freshness:
    """``clock``: monotonic seconds. ``kinds``: plurals of the watched kinds."""

    def __init__(self, kinds: Iterable[str], clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heard: dict[str, float | None] = dict.fromkeys(kinds)
        self._blind: dict[str, float] = dict.fromkeys(self._heard, 0.0)
        self._gap: dict[str, tuple[float, float]] = {}
        """The last gap: its length, and until when it does not count."""

    def heard(self, kind: str) -> None:
        """A byte arrived on the watch, or it ended in good order."""
        if kind not in self._heard:
            return
        before, now = self._heard[kind], self._clock()
        if before is not None and now - before >= GAP_SECONDS:
            self._gap[kind] = (now - before, now + HOLD_SECONDS)
        self._heard[kind] = now

    def connected(self, kind: str) -> None:
        """A list or a new watch was answered: the time since the last sign was blind."""
        if kind not in self._heard:
            return
        before, now = self._heard[kind], self._clock()
        if before is not None:
            self._blind[kind] += now - before
        self._heard[kind] = now

    def ages(self) -> Mapping[str, float | None]:
        """Seconds since the last sign per kind; None before the first."""
        now = self._clock()
        return {kind: None if t is None else now - t for kind, t in self._heard.items()}

    def seen(self, kind: str) -> float:
        """Seen time of a kind, in seconds; comparable with itself only."""
        heard = self._heard[kind]
        return 0.0 if heard is None else heard - self._blind[kind]

    def judged(self, kind: str) -> float:
        """Seen time by which nodes are judged: a gap that has just ended is not in it yet."""
        return self.seen(kind) - (self._gap[kind][0] if self.hold(kind) else 0.0)

    def hold(self, kind: str) -> float:
        """Seconds until `judged` has caught up with `seen`; 0 in ordinary life."""
        _, until = self._gap.get(kind, (0.0, 0.0))
        return max(0.0, until - self._clock())
