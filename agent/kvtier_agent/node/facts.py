"""What this machine has to give, measured: the one place that looks.

`budgets` decides from a frozen `Facts`; this module fills one. Every figure is bytes. A figure that
cannot be read is None with no guess in its place; what that means is for `budgets` to say.

Memory limit: the Pod's, as its control group states it. Version 2 states one limit per level of
the path in ``/proc/self/cgroup`` and the least counts; version 1 the same under its ``memory``
controller, where "unlimited" is a number near 2**63. In a container the path reads ``/`` and the
group's root carries the limit. Without any limit the machine's own memory is the limit, and what
of it others leave (``MemAvailable``) is measured beside it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

__all__ = [
    "Device",
    "Facts",
    "MemoryLimit",
    "Shape",
    "TableFacts",
    "VolumeFacts",
    "available_in",
    "beside_tables",
    "find_device",
    "memory_limit",
    "size_of",
    "volume_facts",
]

Shape = Literal["owned", "engine"]

UNLIMITED_FROM = 1 << 60
"""A version 1 limit from here up means that there is none."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """``source`` is a phrase for messages: "the Pod's memory limit". ``headroom``: the part of it
    that the process itself needs. ``available``: bytes that the machine could give now without
    swapping, beyond what our arenas hold; None where a control group sets the limit, for that is
    promised to us, or where the kernel does not say."""

    size: int
    source: str
    headroom: int = 2 << 30
    available: int | None = None


@dataclass(frozen=True, slots=True)
class Device:
    """The accelerator's memory. ``memories``: of each visible device, in their order, or the
    stand-in without one."""

    kind: Literal["cuda", "cpu"]
    memories: tuple[int, ...]

    @property
    def first(self) -> int:
        """Memory of the device on which an L0 of ours lies, all of it."""
        return self.memories[0]


@dataclass(frozen=True, slots=True)
class VolumeFacts:
    """One mapped volume's filesystem. ``held``: bytes that kvtier's own files already take.
    ``read_only``: nothing can be written now, as after an error of the drive. ``failing``: what
    the last write failed with, empty where none did; ``lost``: they go on failing, and nothing
    that lies there counts until it is time to try again. ``full``: the last write found no room."""

    total: int
    available: int
    held: int = 0
    read_only: bool = False
    failing: str = ""
    lost: bool = False
    full: bool = False


@dataclass(frozen=True, slots=True)
class TableFacts:
    """What the page table of one trust domain can hold. ``share``: one in so many of the node's
    bytes is the domain's; ``slot``, ``nvme_slot``: bytes that a page takes in memory and on NVMe.
    """

    max_pages: int
    share: int
    slot: int
    nvme_slot: int


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything `budgets.plan` needs to know about the machine."""

    shape: Shape
    device: Device
    memory: MemoryLimit | None
    shm_available: int
    """Free bytes of the shared-memory filesystem plus what our own arenas hold there now, less what
    the page tables may still take."""
    arenas_most: int | None = None
    """Bytes that an arena of this process can have at most; None where there is no such bound."""
    arenas_held: int = 0
    """Bytes of memory behind our arenas now, also of what an earlier process left in them."""
    engine_pool: int = 0
    """KV pool of the engines (shape ``engine``), see `engine_pool`; 0 while none is known."""
    page_tokens: tuple[int, ...] = ()
    """Tokens of a page, as engines have registered them, ascending; empty before the first one."""
    tables: tuple[TableFacts, ...] = ()
    """Of the trust domains whose engines have registered, in their order."""
    volumes: Mapping[str, VolumeFacts] = field(default_factory=dict)
    broken: Mapping[str, str] = field(default_factory=dict)
    """Mapped volumes that could not be looked at, and why."""

    @property
    def device_memory(self) -> int:
        """What a percent of the device is of: the one device that an L0 of ours lies on, or all
        that engines may have their pools on."""
        return self.device.first if self.shape == "owned" else sum(self.device.memories)


def memory_limit(
    headroom: int, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> MemoryLimit | None:
    """The least of the control group's limit and the machine's memory."""
    group = _group_limit(proc / "self" / "cgroup", cgroup)
    meminfo = _meminfo(proc / "meminfo")
    machine = meminfo.get("MemTotal")
    if group is not None and (machine is None or group < machine):
        return MemoryLimit(group, "the Pod's memory limit", headroom)
    if machine is None:
        return None
    return MemoryLimit(machine, "this machine's memory", headroom, meminfo.get("MemAvailable"))


def _group_limit(membership: Path, root: Path) -> int | None:
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    found: list[int] = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            base, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        # Up to the root: a parent's limit holds for its children.
        parts = [p for p in path.split("/") if p and p != ".."]
        for depth in range(len(parts), -1, -1):
            size = _read_size(base.joinpath(*parts[:depth]) / name)
            if size is not None:
                found.append(size)
    return min(found, default=None)


def _read_size(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    if not text.isdigit():  # "max"
        return None
    size = int(text)
    return None if size >= UNLIMITED_FROM else size


def _meminfo(path: Path) -> dict[str, int]:
    """Figures of ``/proc/meminfo`` that are sizes, bytes by name."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    found: dict[str, int] = {}
    for line in lines:
        name, _, rest = line.partition(":")
        match rest.split():
            case [size, "kB"] if size.isdigit():
                found[name] = int(size) * 1024
    return found


def available_in(folder: Path, held: int) -> int:
    """Bytes a process may still allocate in ``folder``'s filesystem, plus ``held``, our own."""
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize + held


def beside_tables(room: int, held: int, most: int) -> int:
    """What of ``room`` the arenas may take so that page tables, which hold ``held`` bytes now, can
    grow in the same filesystem: to ``most`` bytes, and to a 64th of it all."""
    return max(0, room - max(0, min(most, (room + held) // 64) - held))


def size_of(folder: Path) -> int:
    """Size of the filesystem that holds ``folder``, bytes."""
    stat = os.statvfs(folder)
    return stat.f_blocks * stat.f_frsize


def volume_facts(mount: Path, held: int = 0, refuses: bool = False) -> VolumeFacts:
    """Size and room of the filesystem at ``mount``. Raises OSError. ``refuses``: the last write was
    refused as to a read-only filesystem; after an error of the drive recent kernels do that without
    marking the mount. (Nothing is written here to find out: a drive that hangs would hold us up.)
    """
    stat = os.statvfs(mount)
    return VolumeFacts(
        total=stat.f_blocks * stat.f_frsize,
        available=stat.f_bavail * stat.f_frsize,
        held=held,
        read_only=refuses or bool(stat.f_flag & os.ST_RDONLY),
    )


def find_device(wanted: Literal["auto", "cpu", "cuda"], stand_in: int) -> Device:
    """The device to use. Raises LookupError when ``cuda`` is asked for and there is none."""
    if wanted == "cuda" or (wanted == "auto" and _has_cuda_driver()):
        import torch  # seconds to import, and not needed for `cpu`

        if torch.cuda.is_available():
            count = torch.cuda.device_count()
            each = (torch.cuda.get_device_properties(i).total_memory for i in range(count))
            return Device("cuda", tuple(each))
        if wanted == "cuda":
            raise LookupError("no CUDA device is visible")
    return Device("cpu", (stand_in,))


def _has_cuda_driver() -> bool:
    """Whether the driver's library is there at all: without it torch need not be asked."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
