"""What a `Core` is made with, and what it says about itself and about failure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvtier_agent.cache.arena import ArenaError, ShmArena
from kvtier_agent.cache.arena_cuda import CudaArena
from kvtier_agent.cache.settings import CacheSettings
from kvtier_agent.storage.io_errors import SLOW_SECONDS
from kvtier_agent.storage.journal_files import JournalSettings
from kvtier_agent.storage.volume import VolumeError


class CoreError(Exception):
    """A tier cannot be set up as asked; one line that says what to do. `reason`: the name of the
    condition's reason (`kvtier_api.reasons`)."""

    def __init__(self, message: str, reason: str = "OutOfMemory") -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """Where one trust domain's tiers live."""

    domain: str
    arena_folder: Path
    """tmpfs folder of the L1 (and, on `cpu`, L0) arena files; usually below /dev/shm."""
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
    """Threads that move pages, 2 to 64; one is always free for reads."""
    synchronous: bool = False
    """Moves are executed inside `pump`, on the caller's thread. For tests and measurements."""
    keep_memory: bool = True
    """Leave the pages of L1 in shared memory when `Core` is closed, for the next process."""
    cache: CacheSettings = field(default_factory=CacheSettings)
    journal: JournalSettings = field(default_factory=JournalSettings)
    """Of L2: how large its logs grow, how fast checkpoints are written."""
    slow_io_seconds: float = SLOW_SECONDS
    """A call to a drive that takes longer is counted as slow."""
    nvme_in_flight_bytes: int = 64 << 20
    """Bytes that a drive has under way at most where there is io_uring, 1 MiB to 64 GiB."""


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


def arena_infos(l0: ShmArena | CudaArena | None, l1: ShmArena) -> tuple[ArenaInfo, ...]:
    """What clients are told of the arenas that there are."""
    infos = []
    for tier, arena in ((0, l0), (1, l1)):
        if isinstance(arena, ShmArena):
            infos.append(ArenaInfo(tier, "shm", str(arena.path), arena.size_bytes))
        elif arena is not None:
            size, chunk = arena.size_bytes, arena.chunk_bytes
            infos.append(ArenaInfo(tier, "cuda", "", size, chunk, arena.handles()))
    return tuple(infos)


def as_core_error(error: Exception) -> CoreError:
    """What went wrong with a tier, as the one error that callers know."""
    if isinstance(error, CoreError):
        return error
    if isinstance(error, VolumeError):
        return CoreError(str(error), error.reason)
    return CoreError(
        str(error), "OutOfMemory" if isinstance(error, ArenaError) else "VolumeUnusable"
    )
