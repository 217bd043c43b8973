"""The arenas as an engine sees them: mapped memory, addressed by byte offset.

An arena arrives as a file descriptor over the lifeline (no path, so a container needs to mount
only the folder of the sockets) or as a CUDA IPC handle. All pages of a put or a load are copied
in one call (``kvtier_agent.native``).

The checksum is always computed over the *copy*: what another client of the domain writes into a
slot after the copy cannot matter, and what it wrote before is found.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.aligned_map import map_shared
from kvtier_agent.native import copier, guard
from kvtier_agent.server.protocol import ArenaInfo

checksum = copier.checksum
"""XXH3-64 of a buffer, as an unsigned integer: the checksum of every page."""

Places = NDArray[np.uint64]


class Mapped(Protocol):
    """One arena of the agent, mapped into this process."""

    tier: int

    def view(self, offset: int, length: int) -> NDArray[np.uint8]:
        """The bytes of a slot, writable; on a device arena a host copy that is not connected."""

    def read(self, offsets: Places, length: int, out: memoryview, rows: Places) -> Places:
        """Copy pages into rows of ``out`` (``length`` bytes each); checksums of the copies.

        ``IndexError`` for a row that is not there.
        """

    def write(self, offsets: Places, length: int, pages: memoryview, rows: Places) -> Places:
        """Copy rows of ``pages`` (``length`` bytes each) into slots; checksums of the copies.

        ``IndexError`` for a row that is not there.
        """


class UnmappedError(LookupError):
    """A slot lies in memory that this client does not map: an L0 grew after it connected, or
    somebody cut the arena short. A new connection maps all that there is."""


class FileArena:
    """An arena in shared memory: L1 always, L0 on a machine without a device."""

    def __init__(self, info: ArenaInfo, descriptor: int) -> None:
        """Maps the file and closes ``descriptor``; ``OSError`` where it cannot be mapped."""
        self.tier = info.tier
        try:
            size = min(info.size_bytes, os.fstat(descriptor).st_size)
            self._array = map_shared(descriptor, size)
        finally:
            os.close(descriptor)
        self._guard = guard(self._array)
        self._memory = self._array.data

    def view(self, offset: int, length: int) -> NDArray[np.uint8]:
        """The bytes of a slot, in place; ``UnmappedError``."""
        self._check(np.array([offset], np.uint64), length)
        return self._array[offset : offset + length]

    def read(self, offsets: Places, length: int, out: memoryview, rows: Places) -> Places:
        """See ``Mapped.read``; ``UnmappedError``."""
        self._check(offsets, length)
        places = rows * np.uint64(length)
        return copier.copy(self._memory, offsets, out, places, length, private="target")

    def write(self, offsets: Places, length: int, pages: memoryview, rows: Places) -> Places:
        """See ``Mapped.write``; ``UnmappedError``."""
        self._check(offsets, length)
        places = rows * np.uint64(length)
        return copier.copy(pages, places, self._memory, offsets, length, private="source")

    def _check(self, offsets: Places, length: int) -> None:
        if self._guard is not None and self._guard.faults:
            raise UnmappedError(f"arena {self.tier} was cut short under this client")
        size = self._memory.nbytes
        if offsets.size and int(offsets.max()) + length > size:
            raise UnmappedError(f"a page reaches past the {size} bytes of arena {self.tier}")


class DeviceArena:
    """An arena in device memory, opened by its CUDA IPC handles; pages pass through the host."""

    def __init__(self, info: ArenaInfo) -> None:
        """Opens the handles; ``RuntimeError`` of torch where the device refuses."""
        from kvtier_agent.cache.arena import open_device_arena

        self.tier = info.tier
        self._memory: Any = open_device_arena(info)

    def view(self, offset: int, length: int) -> NDArray[np.uint8]:
        """A host copy of a slot; ``UnmappedError``."""
        page: NDArray[np.uint8] = self._slot(offset, length).cpu().numpy()
        return page

    def read(self, offsets: Places, length: int, out: memoryview, rows: Places) -> Places:
        """See ``Mapped.read``; ``UnmappedError``."""
        sums = np.empty(len(offsets), np.uint64)
        for i, (offset, row) in enumerate(zip(offsets.tolist(), rows.tolist(), strict=True)):
            target = out[row * length : (row + 1) * length]
            target[:] = self.view(offset, length).data
            sums[i] = checksum(target)
        return sums

    def write(self, offsets: Places, length: int, pages: memoryview, rows: Places) -> Places:
        """See ``Mapped.write``; ``UnmappedError``."""
        import torch

        sums = np.empty(len(offsets), np.uint64)
        for i, (offset, row) in enumerate(zip(offsets.tolist(), rows.tolist(), strict=True)):
            page = np.frombuffer(pages[row * length : (row + 1) * length], np.uint8).copy()
            self._slot(offset, length).copy_(torch.from_numpy(page))
            sums[i] = checksum(page)
        # Another process reads a page as soon as it is committed: the device must have it.
        torch.cuda.synchronize()
        return sums

    def _slot(self, offset: int, length: int) -> Any:
        try:
            return self._memory[offset : offset + length]
        except IndexError as error:
            raise UnmappedError(str(error)) from None


def map_arenas(infos: Sequence[ArenaInfo], descriptors: list[int]) -> dict[int, Mapped]:
    """Map every arena of a ``Welcome``; takes over (and closes) ``descriptors``."""
    arenas: dict[int, Mapped] = {}
    try:
        for info in infos:
            if info.kind == "shm":
                arenas[info.tier] = FileArena(info, descriptors.pop(0))
            elif info.kind == "cuda":
                arenas[info.tier] = DeviceArena(info)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return arenas


def rows_of(source: Any, page_bytes: int, n: int) -> memoryview:
    """A 2-D uint8 array or tensor of shape (n, page_bytes) as one flat read-only buffer.

    Raises ``ValueError`` for another shape or type. A tensor on a device is copied to the host.
    """
    if hasattr(source, "detach"):
        source = source.detach().cpu().contiguous().view(-1).numpy().reshape(source.shape)
    array = np.ascontiguousarray(source)
    if array.dtype != np.uint8 or array.shape != (n, page_bytes):
        raise ValueError(
            f"pages of shape {array.shape} {array.dtype} where ({n}, {page_bytes}) uint8 belong"
        )
    return array.data.cast("B") if array.size else memoryview(b"")
