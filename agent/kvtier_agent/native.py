"""What runs without the interpreter's lock: in Rust where the extension is installed.

Copies with checksums have a fallback in Python with equal results. A guard against files that are
cut short and rings of io_uring exist with the extension only; who asks for one copes without.

The one place that imports `kvtier_native` (distribution `kvtier-native`, made from `native/`).
Which of the two is in use is settled at import: `NATIVE` is the extension or None, `WHY_NOT` says
why there is none. `KVTIER_NATIVE=0` in the environment leaves it out.

The checksum of a page is XXH3-64 with seed 0, everywhere: on the wire, in the page table, in the
headers of segment files.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import Any, Final, Literal, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

Offsets = NDArray[np.uint64]
Side = Literal["source", "target"]

NEEDED: Final = ("Guard", "Index", "Ring", "checksum", "checksums", "copy_checksums", "kernels")
"""What this version uses of the extension, which is installed by itself and may be an older one."""

STREAMING_BYTES = 256 << 10
"""Pieces of at least this size are written past the processor's cache."""


class Copier(Protocol):
    """How pieces of memory are copied and summed."""

    def copy(
        self,
        source: Any,
        source_offsets: Offsets,
        target: Any,
        target_offsets: Offsets,
        length: int,
        *,
        private: Side,
    ) -> NDArray[np.uint64]:
        """Copy pieces of `length` bytes between two buffers; XXH3-64 of the *copies*, uint64[n].

        Piece i goes from byte `source_offsets[i]` to byte `target_offsets[i]`, in this order.
        Buffers are contiguous. Other processes may write into one of them meanwhile, not into the
        `private` one: that may spoil the copy, but cannot make the checksum vouch for it.
        Raises `IndexError`, before anything is copied, when a piece reaches past the end of a
        buffer; `ValueError` for offsets that are not uint64 or not as many, and for pieces that
        overlap.
        """

    def checksums(self, source: Any, offsets: Offsets, length: int) -> NDArray[np.uint64]:
        """XXH3-64 of pieces of `length` bytes at `offsets` of a buffer, uint64[n]. Raises as
        `copy` does."""

    def checksum(self, source: Any) -> int:
        """XXH3-64 of a contiguous buffer."""


class PythonCopier:
    """The fallback, and what the extension is tested against."""

    def copy(
        self,
        source: Any,
        source_offsets: Offsets,
        target: Any,
        target_offsets: Offsets,
        length: int,
        *,
        private: Side,
    ) -> NDArray[np.uint64]:
        """See `Copier.copy`."""
        reads, writes = _bytes(source, "source"), _bytes(target, "target")
        if writes.readonly:
            raise ValueError("target must be writable")
        if len(source_offsets) != len(target_offsets):
            raise ValueError(
                f"{len(source_offsets)} source_offsets for {len(target_offsets)} target_offsets"
            )
        starts = _inside(reads, source_offsets, length, "source")
        ends = _inside(writes, target_offsets, length, "target")
        if length and _overlap(reads, source_offsets, writes, target_offsets, length):
            raise ValueError("pieces of source and target overlap")
        sums = np.empty(len(starts), np.uint64)
        for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
            piece, place = reads[start : start + length], writes[end : end + length]
            place[:] = piece
            sums[i] = xxhash.xxh3_64_intdigest(piece if private == "source" else place)
        return sums

    def checksums(self, source: Any, offsets: Offsets, length: int) -> NDArray[np.uint64]:
        """See `Copier.checksums`."""
        reads = _bytes(source, "source")
        starts = _inside(reads, offsets, length, "source")
        sums = (xxhash.xxh3_64_intdigest(reads[start : start + length]) for start in starts)
        return np.fromiter(sums, np.uint64, len(starts))

    def checksum(self, source: Any) -> int:
        """See `Copier.checksum`."""
        return int(xxhash.xxh3_64_intdigest(source))


class NativeCopier:
    """The extension: one call a batch, the interpreter's lock released, one pass over the bytes."""

    def __init__(self, module: Any) -> None:
        self._copy = module.copy_checksums
        self._checksums = module.checksums
        self._checksum = module.checksum

    def copy(
        self,
        source: Any,
        source_offsets: Offsets,
        target: Any,
        target_offsets: Offsets,
        length: int,
        *,
        private: Side,
    ) -> NDArray[np.uint64]:
        """See `Copier.copy`. Every byte is read once, so neither side need be private."""
        sums = np.empty(len(source_offsets), np.uint64)
        streaming = length >= STREAMING_BYTES
        self._copy(source, source_offsets, target, target_offsets, length, sums, streaming)
        return sums

    def checksums(self, source: Any, offsets: Offsets, length: int) -> NDArray[np.uint64]:
        """See `Copier.checksums`."""
        sums = np.empty(len(offsets), np.uint64)
        self._checksums(source, offsets, length, sums)
        return sums

    def checksum(self, source: Any) -> int:
        """See `Copier.checksum`."""
        return int(self._checksum(source))


def _bytes(buffer: Any, what: str) -> memoryview:
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError(f"{what} must be contiguous")
    return view.cast("B") if view.nbytes else memoryview(b"")


def _inside(view: memoryview, offsets: Offsets, length: int, what: str) -> list[int]:
    if offsets.dtype != np.uint64:
        raise ValueError(f"{what}_offsets must be an array of uint64")
    starts: list[int] = offsets.tolist()
    for i, start in enumerate(starts):
        if start + length > view.nbytes:
            raise IndexError(
                f"{length} bytes at offset {start} (number {i}) reach past the end of {what},"
                f" which has {view.nbytes} bytes"
            )
    return starts


def _overlap(a: memoryview, starts: Offsets, b: memoryview, ends: Offsets, length: int) -> bool:
    first, second = np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8)
    if not np.may_share_memory(first, second):
        return False
    taken = np.sort(ends + np.uint64(second.ctypes.data))
    wanted = starts + np.uint64(first.ctypes.data)
    # All pieces are of one size: the nearest one that ends behind the start decides.
    nearest = np.searchsorted(taken + np.uint64(length), wanted, side="right")
    inside = nearest < len(taken)
    return bool((taken[nearest[inside]] < wanted[inside] + np.uint64(length)).any())


def load(environ: Mapping[str, str]) -> tuple[Any, str]:
    """(the extension, "") or (None, why not). In doubt there is none: an engine must not fail to
    start over a variable."""
    wanted = environ.get("KVTIER_NATIVE", "1")
    if wanted != "1":
        doubt = "" if wanted == "0" else "; write 1 to use the extension, or 0 not to"
        return None, f"KVTIER_NATIVE={wanted}{doubt}"
    try:
        import kvtier_native
    except ImportError as error:
        return None, f"kvtier_native cannot be imported: {error}"
    missing = [name for name in NEEDED if not hasattr(kvtier_native, name)]
    if missing:
        return None, f"kvtier_native is of another version: it lacks {', '.join(missing)}"
    return kvtier_native, ""


NATIVE, WHY_NOT = load(os.environ)
"""The extension or None, and why there is none."""


def described() -> str:
    """One word for logs: the processor's instructions that are used, or `none`, and why."""
    return f"none ({WHY_NOT})" if NATIVE is None else str(NATIVE.kernels()[-1])


copier: Copier = PythonCopier() if NATIVE is None else NativeCopier(NATIVE)
"""What this process copies and sums with."""


class Guard(Protocol):
    """A mapping whose lost pages are replaced by zeros instead of killing the process."""

    @property
    def faults(self) -> int:
        """Pages that were lost and replaced so far. With any, the mapping is to be given up: the
        replaced pages belong to this process alone, whatever becomes of the file."""

    def close(self) -> None:
        """Guard no longer."""


def guard(mapping: Any) -> Guard | None:
    """Guard a writable buffer over a mapped file: when the file is cut short, an access to a page
    behind its end finds zeros, and the page's checksum fails, instead of SIGBUS.

    The mapping cannot be closed while the guard exists. None without the extension, and where the
    handler cannot be installed: then a file cut short kills the process, as it does any other.
    """
    if NATIVE is None:
        return None
    try:
        made: Guard = NATIVE.Guard(mapping)
    except (OSError, RuntimeError):
        return None
    return made


COMPLETION = np.dtype([("tag", "<u8"), ("result", "<i8")])
"""What `collect` of a ring returns, by `numpy.frombuffer`: result is bytes, or -errno."""
TRANSFER_COLUMNS = (
    "operation",
    "file",
    "file_offset",
    "offset",
    "length",
    "header_offset",
    "header_length",
    "tag",
)
"""Columns of the rows of uint64 that `submit` of a ring takes."""
READ, WRITE, FLUSH = 0, 1, 2
"""Operations of a ring."""


def ring(arena: Any, headers: Any = None, **settings: int) -> Any:
    """A `kvtier_native.Ring` (its docstring has the details): transfers by io_uring between files
    and two buffers. Raises `OSError` where there can be none, and preadv and pwritev remain."""
    if NATIVE is None:
        raise OSError(errno.ENOSYS, f"no io_uring without the native extension ({WHY_NOT})")
    return NATIVE.Ring(arena, headers, **settings)
