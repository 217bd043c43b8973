"""The server's knobs: unit, default and bounds of each. ``kvtier_agent.node`` fills them in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier_agent.storage.core import Core


class ServerError(Exception):
    """The server cannot start as asked; one line that says what to do."""


def _bounds(owner: object, name: str, low: float, high: float) -> None:
    value = getattr(owner, name)
    if not low <= value <= high:
        raise ServerError(f"{name} is {value}; write a value from {low:g} to {high:g}")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where the agent listens, and its limits."""

    run_dir: Path
    """Folder of the sockets, one agent per folder."""
    max_keys: int = 65_536
    """Pages one call may name, 1 to 2^20; a client asks for the first so many of a longer chain."""
    max_clients: int = 256
    """Clients per trust domain, 1 to 10,000."""
    high_water_mark: int = 64
    """Answers queued per client, 1 to 100,000; more are dropped. Twice what waits of its questions:
    who takes no answers has no use for more, of up to 1.2 MiB each."""
    most_waiting: int = 32
    """Messages of one client that wait in the agent, 1 to 100,000; more wait with the client, in
    its own memory. Clients ask one question at a time: many are a flood, of up to 4 MiB each."""
    lifeline_grace_seconds: float = 2.0
    """A client that said hello must hold its lifeline by then, seconds, 0.1 to 60."""
    lease_seconds: float = 60.0
    """As the cache's: when a lease counts as given back, seconds, 1 to 3600."""
    longest_deadline_milliseconds: int = 60_000
    """A load waits at most so long, whatever it asks for, milliseconds, 1 to 600,000."""
    tick_seconds: float = 0.05
    """The cache's clock runs at most this often, seconds, 0.001 to 1."""
    snapshot_seconds: float = 0.5
    """How old the figures for metrics and status may get, seconds, 0.05 to 60."""
    geometry_grace_seconds: float = 30.0
    """A trust domain keeps its page geometry for so long after its last engine left; then an engine
    of another model may have the domain, from cold. Seconds, 0 to 86,400."""
    messages_per_round: int = 64
    """Messages taken from one socket before the others have their turn, 1 to 10,000."""

    def __post_init__(self) -> None:
        _bounds(self, "max_keys", 1, 1 << 20)
        _bounds(self, "max_clients", 1, 10_000)
        _bounds(self, "high_water_mark", 1, 100_000)
        _bounds(self, "most_waiting", 1, 100_000)
        _bounds(self, "lifeline_grace_seconds", 0.1, 60)
        _bounds(self, "lease_seconds", 1, 3600)
        _bounds(self, "longest_deadline_milliseconds", 1, 600_000)
        _bounds(self, "tick_seconds", 0.001, 1)
        _bounds(self, "snapshot_seconds", 0.05, 60)
        _bounds(self, "geometry_grace_seconds", 0, 86_400)
        _bounds(self, "messages_per_round", 1, 10_000)

    @property
    def max_frame_bytes(self) -> int:
        """Largest frame that ZeroMQ passes on; what is larger ends the sender's connection.

        Four times the largest legal one, so that somewhat oversized calls get a clear answer.
        """
        return 4 * 16 * self.max_keys + 65_536


@dataclass(frozen=True, slots=True, eq=False)
class TrustDomain:
    """Clients that share one socket and one cache: ``<run dir>/<name>.sock`` and ``.life``."""

    name: str
    core: Core
    gid: int | None = None
    """Group that may connect; None: the agent's own."""
