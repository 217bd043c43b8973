"""Segment files: fixed slots of one size, laid out before they are written.

    slot:  header (4096) | payload (the page, rounded up to a multiple of 4096)

A header names everything needed to trust the payload on its own: key, parent, what names the
geometry and how its pages are cut (`Geometry.stored_as`), length, depth, checksum and its
algorithm, a sequence number (of two slots with the same
key the higher one is newer), the generation of the segment (it rises each time that the segment is
written anew) and a checksum of itself. Behind it in its block lie the sums of the page's transfer
units where there are several: the page's checksum is the hash of them, so they need no other.
A slot is written with one call, header and
payload together; a torn write fails one of the checksums and is a miss.

Neighbouring slots are written and read with one call for all of them, straight from and to the
arena: its slots are page aligned, so O_DIRECT needs no bounce buffer for the payload.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.units import PageForm, Sums
from kvtier_agent.storage.checksum import ALGORITHM_XXH3_64, ALGORITHM_XXH3_64_UNITS, checksums
from kvtier_agent.storage.fileio import IOV_MAX, FileIO

HEADER_BYTES = 4096
MAGIC = b"KVTIERSG"
LAYOUT_VERSION = 2

HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("algorithm", "<u4"),
        ("key", "u1", 16),
        ("parent", "u1", 16),
        ("fingerprint", "u1", 16),
        ("length", "<u4"),
        ("depth", "<u4"),
        ("checksum", "<u8"),
        ("sequence", "<u8"),
        ("generation", "<u4"),
        ("reserved", "<u4"),
        ("header_checksum", "<u8"),
    ]
)
_COVERED = HEADER.itemsize - 8  # all but the header's own checksum


def _algorithm(form: PageForm) -> int:
    """What the header says of how the page's checksum is made."""
    return ALGORITHM_XXH3_64 if form.units == 1 else ALGORITHM_XXH3_64_UNITS


def segment_name(number: int) -> str:
    """The file name of a segment."""
    return f"segment-{number:08d}.kv"


@dataclass(frozen=True, slots=True)
class PageStamp:
    """What header and journal say of each page of a batch. Arrays of length n; `tenants`, for the
    journal alone: whose page it is, None for nobody."""

    keys: NDArray[np.uint8]
    parents: NDArray[np.uint8]
    depths: NDArray[np.uint32]
    checksums: NDArray[np.uint64]
    tenants: NDArray[np.uint16] | None = None

    def some(self, which: NDArray[Any] | slice) -> PageStamp:
        """Of some of the pages."""
        return PageStamp(
            self.keys[which],
            self.parents[which],
            self.depths[which],
            self.checksums[which],
            None if self.tenants is None else self.tenants[which],
        )


class HeaderBlock:
    """Page-aligned memory for `count` headers, 4096 bytes each: its own, or part of `memory`."""

    def __init__(self, count: int, memory: mmap.mmap | None = None, offset: int = 0) -> None:
        memory = memory or mmap.mmap(-1, count * HEADER_BYTES)
        self.bytes: NDArray[np.uint8] = np.frombuffer(
            memory, dtype=np.uint8, count=count * HEADER_BYTES, offset=offset
        ).reshape(count, HEADER_BYTES)
        self.fields: NDArray[Any] = np.ndarray(
            (count,), dtype=HEADER, buffer=memory, offset=offset, strides=(HEADER_BYTES,)
        )

    def unit_sums(self, count: int, form: PageForm) -> Sums:
        """The unit sums behind the first headers, (count, units), in place; of several units."""
        place = self.bytes[:count, HEADER.itemsize : HEADER.itemsize + form.sums_bytes]
        return place.view("<u8")

    def fill(
        self, stamp: PageStamp, stored_as: bytes, form: PageForm, sums: Sums, sequence: int
    ) -> None:
        """What the headers of a batch say. `sums`: of the units, (n, units); sequence numbers go up
        from `sequence`. They are whole when they are sealed."""
        count = len(stamp.keys)
        fields = self.fields[:count]
        fields["magic"] = MAGIC
        fields["version"] = LAYOUT_VERSION
        fields["algorithm"] = _algorithm(form)
        fields["key"] = stamp.keys
        fields["parent"] = stamp.parents
        fields["fingerprint"] = np.frombuffer(stored_as, dtype=np.uint8)
        fields["length"] = form.page_bytes
        fields["depth"] = stamp.depths
        fields["checksum"] = stamp.checksums
        fields["sequence"] = np.arange(sequence, sequence + count, dtype=np.uint64)
        if form.units > 1:
            self.unit_sums(count, form)[:] = sums

    def seal(self, first: int, count: int, generation: int) -> None:
        """The generation of the segment that these of them go to, and their own checksums."""
        fields = self.fields[first : first + count]
        fields["generation"] = generation
        fields["header_checksum"] = self.own_checksums(first, count)

    def own_checksums(self, first: int, count: int) -> NDArray[np.uint64]:
        return checksums(self.bytes, np.arange(first, first + count, dtype=np.uint32), _COVERED)

    def valid(self, count: int, stored_as: bytes, form: PageForm) -> NDArray[np.bool_]:
        """Which headers are whole, of this layout and of this geometry, the unit sums behind them
        included."""
        fields = self.fields[:count]
        good: NDArray[np.bool_] = (
            (fields["magic"] == MAGIC)
            & (fields["version"] == LAYOUT_VERSION)
            & (fields["algorithm"] == _algorithm(form))
            & (fields["length"] == form.page_bytes)
            & (fields["fingerprint"] == np.frombuffer(stored_as, dtype=np.uint8)).all(axis=1)
        )
        if good.any():
            good &= fields["header_checksum"] == self.own_checksums(0, count)
            if form.units > 1:
                good &= fields["checksum"] == form.checksums(self.unit_sums(count, form))
        return good

    def unwritten(self, count: int, generations: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Which of the first headers say that the write of this generation of their segment (0: not
        asked about) is not there: blank, or whole and of another one (a later one where the record
        is too old, as a journal that was removed and came back is). A header lies in one sector,
        which a power cut leaves as one or the other."""
        fields = self.fields[:count]
        gone: NDArray[np.bool_] = (fields["magic"] == MAGIC) & (fields["generation"] != generations)
        if gone.any():
            gone &= fields["header_checksum"] == self.own_checksums(0, count)
        gone |= (self.bytes[:count] == 0).all(axis=1)
        gone &= generations > 0
        return gone


class BlockCount:
    """Bytes of blocks that several segments take; each says what changes, one at a time."""

    turn = threading.Lock()

    def __init__(self) -> None:
        self.bytes = 0


class RingFiles(Protocol):
    """The table of files of a ring, as a segment sees it."""

    def drop_file(self, number: int) -> None: ...


class SegmentGoneError(OSError):
    """The file was closed: its volume was withdrawn, or its last slot was given back."""


_NAMES: dict[Path, threading.Lock] = {}


def _names_in(folder: Path) -> threading.Lock:
    """Held while names of segments in a folder change hands: whether a name is still that of the
    file to be removed must not change between the look and the removal."""
    return _NAMES.setdefault(folder, threading.Lock())


class Segment:
    """One file of `slots` slots. Offsets in it are exact; who may use which slot is `L2`'s rule."""

    def __init__(
        self,
        path: Path,
        number: int,
        slots: int,
        payload_bytes: int,
        io: FileIO,
        *,
        create: bool,
        generation: int = 0,
    ) -> None:
        """Opens (or creates) the file. `payload_bytes`: of a page, a multiple of 4096;
        `generation`: of what it holds. Raises OSError."""
        self.path = path
        self.number = number
        self.slots = slots
        self.stride = HEADER_BYTES + payload_bytes
        self.use = (0, generation)
        """Which use of its numbers this is: the epoch by which the cache tells uses apart, and the
        generation by which files and journals do. Changed as a whole."""
        self.found = not create
        """Is what it holds of an earlier process, which a power cut may have ended?"""
        self.named = False
        """Does the folder's entry of the file last? (See `L2.write`, durability sync.)"""
        self.ring_file: tuple[RingFiles, int] | None = None
        """Which ring knows the file, by which number."""
        self._io = io
        self._guard = threading.Lock()
        self._users = 0
        self._leaving = False
        with _names_in(path.parent):
            if create:
                # One of this name may still be on its way out (`remove`): no place for pages.
                with contextlib.suppress(FileNotFoundError):
                    io.unlink(path)
            self.fd, self.direct = io.open(path, create=create, direct=True)
        self._allocated = io.allocated(self.fd)
        self._counted: BlockCount | None = None
        self.laid: NDArray[np.bool_] = np.zeros(slots, dtype=bool)

    @property
    def allocated(self) -> int:
        """Bytes of blocks that the file took when that last changed."""
        return self._allocated

    def count_in(self, count: BlockCount | None) -> None:
        """From now on its blocks count here, or nowhere, and no more where they did."""
        with BlockCount.turn:
            if self._counted is not None:
                self._counted.bytes -= self._allocated
            self._counted = count
            if count is not None:
                count.bytes += self._allocated

    def _measure(self) -> None:
        taken = self._io.allocated(self.fd)
        with BlockCount.turn:
            if self._counted is not None:
                self._counted.bytes += taken - self._allocated
            self._allocated = taken

    def lay_out(self, first: int, count: int) -> None:
        """Give blocks to a run of slots. Raises OSError (ENOSPC)."""
        with self.in_use():
            try:
                self._io.allocate(self.fd, first * self.stride, count * self.stride)
                self.laid[first : first + count] = True
            finally:
                self._measure()

    def punch(self, first: int, count: int) -> None:
        """Give the blocks of a run of slots back."""
        with self.in_use():
            if self._io.punch(self.fd, first * self.stride, count * self.stride):
                self.laid[first : first + count] = False
            self._measure()

    def write(self, first: int, headers: NDArray[np.uint8], rows: list[Any]) -> None:
        """Write neighbouring slots from `first` on. Raises OSError, also for a short write."""
        with self.in_use():
            self._transfer(self._io.write, first, headers, rows, "write")

    def read(self, first: int, headers: NDArray[np.uint8], rows: list[Any]) -> None:
        """Read neighbouring slots from `first` on. Raises OSError, also for a short read."""
        with self.in_use():
            self._transfer(self._io.read, first, headers, rows, "read")

    def _transfer(
        self, call: Any, first: int, headers: NDArray[np.uint8], rows: list[Any], what: str
    ) -> None:
        step = IOV_MAX // 2
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            buffers: list[Any] = []
            for i, row in enumerate(part):
                buffers += (headers[start + i], row)
            offset = (first + start) * self.stride
            self._call(call, buffers, offset, len(part) * self.stride, what)

    def read_part(self, slot: int, start: int, buffers: list[Any], length: int) -> None:
        """Read `length` bytes of a slot from `start` on, both multiples of 4096. Raises OSError,
        also for a short read."""
        with self.in_use():
            self._call(self._io.read, buffers, slot * self.stride + start, length, "read")

    def _call(self, call: Any, buffers: list[Any], offset: int, length: int, what: str) -> None:
        try:
            done = call(self.fd, buffers, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.direct:
                raise
            self._leave_direct()
            done = call(self.fd, buffers, offset)
        if done != length:
            self._io.noticed(what, "short")
            raise OSError(5, f"short {what} of {done} instead of {length} bytes")

    def _leave_direct(self) -> None:
        """The file system took the flag but not the transfer: go on through the page cache."""
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.direct = False

    def flush(self) -> None:
        with self.in_use():
            self._io.flush(self.fd)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keeps the file open: a descriptor closed before the system call is made may be that of
        another file by then. Raises `SegmentGoneError` when it is closed already."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> None:
        """The file stays open until `leave`. Raises `SegmentGoneError`."""
        with self._guard:
            if self._leaving:
                raise SegmentGoneError(errno.ENOENT, "the segment is gone")
            self._users += 1

    def leave(self) -> None:
        """Once for each `enter`."""
        with self._guard:
            self._users -= 1
            self._close_if_idle()

    def close(self) -> None:
        """Closes the file when the last transfer has ended. A second call does nothing."""
        with self._guard:
            self._leaving = True
            self._close_if_idle()

    def remove(self) -> None:
        """Removes the file, unless another one has its name by now, and closes it. May take as long
        as the drive does; failures are left to the next start."""
        with contextlib.suppress(OSError), self.in_use(), _names_in(self.path.parent):
            if os.path.samestat(os.fstat(self.fd), self.path.stat(follow_symlinks=False)):
                self._io.unlink(self.path)
        self.close()

    def _close_if_idle(self) -> None:
        if self._leaving and not self._users and self.fd >= 0:
            if self.ring_file is not None:
                self.ring_file[0].drop_file(self.ring_file[1])
                self.ring_file = None
            self._io.close(self.fd)
            self.fd = -1
