"""`Core`: one trust domain's cache with its arenas, volumes and mover: the edge where effects are.

The server calls `core.cache` on the cache thread, then `core.pump()`; when the mover's wake-up
fires it calls `core.collect(now)`, which gives finished tickets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvtier_agent.cache.cache import Cache
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.results import Registration, Ticket
from kvtier_agent.cache.settings import Behaviour, Budgets, CacheSettings


class CoreError(Exception):
    """A tier cannot be set up as asked; one line that says what to do."""


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """Where one trust domain's tiers live."""

    domain: str
    arena_folder: Path
    """tmpfs folder of the L1 (and, on `cpu`, L0) arena files; usually /dev/shm."""
    table_path: Path
    """The page table file (also on tmpfs); readable by clients of the domain."""
    volumes: Mapping[str, Path]
    """Volume name -> mount directory."""
    maximum_l0_bytes: int
    """Largest L0 a later revision may ask for: address space only (`cpu`), bytes."""
    maximum_l1_bytes: int
    """Largest L1 a later revision may ask for: address space only, bytes."""
    device: str = "cpu"
    """`cpu` or `cuda[:N]`."""
    gid: int | None = None
    """Group that may map the arena; None: the agent's own."""
    allow_root_filesystem: bool = False
    """Standalone only: accept a volume on the root file system."""
    mover_threads: int = 2
    cache: CacheSettings = field(default_factory=CacheSettings)


@dataclass(frozen=True, slots=True)
class ArenaInfo:
    """What a client needs to map an arena: `kind` shm (path) or cuda (handles, one per chunk)."""

    tier: int
    kind: str
    path: str
    size_bytes: int
    chunk_bytes: int = 0
    handles: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Layout:
    """What Hello tells a client. `boot_id`: 16 bytes, new at every start; leases are void after."""

    boot_id: bytes
    layout_version: int
    key_version: int
    page_bytes: int
    slot_bytes: int
    arenas: tuple[ArenaInfo, ...]
    table_path: str


class Core:
    cache: Cache

    def __init__(self, settings: CoreSettings, *, wake: Callable[[], None] = lambda: None) -> None:
        """`wake`: called on a mover thread when an outcome waits; thread-safe and cheap."""
        raise NotImplementedError

    def prepare(self, behaviour: Behaviour, budgets: Budgets) -> None:
        """Any thread, may take seconds: open volumes, back arena memory for `budgets`.
        Raises CoreError and changes nothing that is in force."""
        raise NotImplementedError

    def reconfigure(self, now: float, behaviour: Behaviour, budgets: Budgets) -> None:
        """Cache thread: put a revision in force (calls `prepare` if that was not done)."""
        raise NotImplementedError

    def register(self, now: float, geometry: Geometry) -> Registration:
        """Cache thread: a client's geometry; the first one lays out slots and opens L2."""
        raise NotImplementedError

    def layout(self) -> Layout | None:
        """None before the first geometry."""
        raise NotImplementedError

    def pump(self) -> None:
        """Cache thread, after every batch of calls: hand new moves to the mover. Never waits."""
        raise NotImplementedError

    def collect(self, now: float) -> list[Ticket]:
        """Cache thread, after a wake-up: feed outcomes to the cache; tickets finished by them."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop the mover, release locks, remove arena files. L2 stays as durability says."""
        raise NotImplementedError
