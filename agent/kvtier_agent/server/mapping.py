"""The arenas as an engine sees them: mapped memory, addressed by byte offset.

An arena arrives as a file descriptor over the lifeline (no path, so a container needs to mount
only the folder of the sockets) or as a CUDA IPC handle. All pages of a put or a load are copied
in one call (``kvtier_agent.native``).

The checksum is always computed over the *copy*: what another client of the domain writes into a
slot after the copy cannot matter, and what it wrote before is found. Pages of several transfer
units have the sums of those behind them in their slots, written with them (`cache.units`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.aligned_map import map_shared
from kvtier_agent.cache.units import PageForm
from kvtier_agent.native import copier, guard
from kvtier_agent.server.protocol import ArenaInfo

checksum = copier.checksum
"""XXH3-64 of a buffer, as an unsigned integer: the checksum of a page of one transfer unit."""

Places = NDArray[np.uint64]


class Mapped(Protocol):
    """One arena of the agent, mapped into this process."""

    tier: int

    def view(self, offset: int, length: int) -> NDArray[np.uint8]:
        """The bytes of a slot, writable; on a device arena a host copy that is not connected."""

    def read(self, offsets: Places, form: PageForm, out: memoryview, rows: Places) -> Places:
        """Copy pages into rows of ``out`` (a page each); checksums of the copies.

        ``IndexError`` for a row that is not there.
        """

    def write(self, offsets: Places, form: PageForm, pages: memoryview, rows: Places) -> Places:
        """Copy rows of ``pages`` (a page each) into slots, their unit sums behind them; checksums
        of the copies.

        ``IndexError`` for a row that is not there.
        """

    def read_units(
        self, offsets: Places, form: PageForm, units: range, out: memoryview, places: Places
    ) -> Places:
        """Copy some neighbouring units of pages to where in ``out`` their first one goes; sums of
        the copies, (n, units copied)."""

    def left(self, offsets: Places, form: PageForm) -> tuple[Places, Places]:
        """The unit sums behind pages, (n, units), and the checksums that the pages have by them."""

    def leave(self, offsets: Places, form: PageForm, sums: Places) -> Places:
        """Put unit sums, (n, units), behind pages that lie in these slots; the checksums that the
        pages have by them. For pages of several units."""


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

    def read(self, offsets: Places, form: PageForm, out: memoryview, rows: Places) -> Places:
        """See ``Mapped.read``; ``UnmappedError``."""
        self._check(offsets, form.extent)
        places = rows * np.uint64(form.page_bytes)
        return form.checksums(form.copy(self._memory, offsets, out, places, private="target"))

    def write(self, offsets: Places, form: PageForm, pages: memoryview, rows: Places) -> Places:
        """See ``Mapped.write``; ``UnmappedError``."""
        self._check(offsets, form.extent)
        places = rows * np.uint64(form.page_bytes)
        sums = form.copy(pages, places, self._memory, offsets, private="source")
        return form.checksums(sums) if form.units == 1 else self.leave(offsets, form, sums)

    def read_units(
        self, offsets: Places, form: PageForm, units: range, out: memoryview, places: Places
    ) -> Places:
        """See ``Mapped.read_units``; ``UnmappedError``."""
        self._check(offsets, form.extent)
        return form.copy(
            self._memory, offsets, out, places,
            private="target", first=units.start, last=units.stop,
        )  # fmt: skip

    def left(self, offsets: Places, form: PageForm) -> tuple[Places, Places]:
        """See ``Mapped.left``; ``UnmappedError``."""
        self._check(offsets, form.extent)
        sums = np.empty((len(offsets), form.units), np.uint64)
        places = np.arange(len(offsets), dtype=np.uint64) * np.uint64(form.sums_bytes)
        behind = offsets + np.uint64(form.trailer)
        return sums, copier.copy(
            self._memory, behind, sums, places, form.sums_bytes,
            private="target",
        )  # fmt: skip

    def leave(self, offsets: Places, form: PageForm, sums: Places) -> Places:
        """See ``Mapped.leave``; ``UnmappedError``."""
        self._check(offsets, form.extent)
        flat = np.ascontiguousarray(sums, "<u8")
        starts = np.arange(len(flat), dtype=np.uint64) * np.uint64(form.sums_bytes)
        behind = offsets + np.uint64(form.trailer)
        # The hash of the copy is what the checksum of such a page is.
        return copier.copy(
            flat.data, starts, self._memory, behind, form.sums_bytes, private="source"
        )

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

    def read(self, offsets: Places, form: PageForm, out: memoryview, rows: Places) -> Places:
        """See ``Mapped.read``; ``UnmappedError``."""
        length = form.page_bytes
        for offset, row in zip(offsets.tolist(), rows.tolist(), strict=True):
            out[row * length : (row + 1) * length] = self.view(offset, length).data
        return form.checksums(form.sums(out, rows * np.uint64(length)))

    def write(self, offsets: Places, form: PageForm, pages: memoryview, rows: Places) -> Places:
        """See ``Mapped.write``; ``UnmappedError``."""
        length = form.page_bytes
        sums = form.sums(pages, rows * np.uint64(length))
        for offset, row in zip(offsets.tolist(), rows.tolist(), strict=True):
            self._put(offset, np.frombuffer(pages[row * length : (row + 1) * length], np.uint8))
        if form.units > 1:
            return self.leave(offsets, form, sums)
        self._settle()
        return form.checksums(sums)

    def read_units(
        self, offsets: Places, form: PageForm, units: range, out: memoryview, places: Places
    ) -> Places:
        """See ``Mapped.read_units``; ``UnmappedError``."""
        sums = np.empty((len(offsets), len(units)), np.uint64)
        first = form.start(units.start)
        for i, (offset, place) in enumerate(zip(offsets.tolist(), places.tolist(), strict=True)):
            data = self.view(offset + first, form.start(units.stop) - first)
            out[place : place + data.size] = data.data
            for unit in units:
                start, end = form.start(unit) - first, form.start(unit + 1) - first
                sums[i, unit - units.start] = checksum(out[place + start : place + end])
        return sums

    def left(self, offsets: Places, form: PageForm) -> tuple[Places, Places]:
        """See ``Mapped.left``; ``UnmappedError``."""
        behind = (self.view(o + form.trailer, form.sums_bytes) for o in offsets.tolist())
        sums = np.array([one.view("<u8") for one in behind]).reshape(len(offsets), form.units)
        return sums, form.checksums(sums)

    def leave(self, offsets: Places, form: PageForm, sums: Places) -> Places:
        """See ``Mapped.leave``; ``UnmappedError``."""
        raw = np.ascontiguousarray(sums, "<u8").view(np.uint8)
        for offset, one in zip(offsets.tolist(), raw, strict=True):
            self._put(offset + form.trailer, one)
        self._settle()
        return form.checksums(sums)

    def _put(self, offset: int, data: NDArray[np.uint8]) -> None:
        import torch

        self._slot(offset, data.size).copy_(torch.from_numpy(data.copy()))

    @staticmethod
    def _settle() -> None:
        """Another process reads a page as soon as it is committed: the device must have it."""
        import torch

        torch.cuda.synchronize()

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
