"""Arenas: the memory of L0 and L1, cut into slots, mapped by clients.

L1 is one shared-memory file. It is created sparse at the largest size it may ever have, so that a
client maps it once and a later revision grows it without a word to anybody; it is never truncated.
Memory is put behind a slot with `posix_fallocate` before the slot is used, so a full tmpfs is an
error when a revision is applied, never a SIGBUS in a client; it is given back by punching holes. A
hole reads as zeros, so a client with a stale offset sees a checksum that fails. What is backed is
remembered: the kernel takes a second to find nothing to do for some GiB, and the cache thread asks
again for what was prepared for it.

L0 on a machine without a device (`cpu`) is a second such file, and the same code runs. On `cuda` it
is device memory in chunks, exported by CUDA IPC handles, one per chunk (`arena_cuda`).

An arena is a fresh file, or the one of the process before (`KeptFile`), so that its pages outlive
an agent. Whoever still maps that one may write into it: what is read is checked against its
checksum by the reader, as always.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.aligned_map import map_shared
from kvtier_agent.cache.geometry import ALIGNMENT, align_up
from kvtier_agent.native import guard

MADV_COLLAPSE = 25
HUGE_PAGE = 2 << 20
BACK_STEP = 64 << 20
ARENA_MODE = 0o660
FALLOC_FL_KEEP_SIZE = 1
FALLOC_FL_PUNCH_HOLE = 2

Progress = Callable[[], None]
"""Called after each step of what may take minutes, so that its thread is seen to live."""


def unseen() -> None:
    """Nobody watches the progress."""


_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class ArenaError(Exception):
    """Memory for a tier cannot be had; one line that says what to do."""


def punch_hole(fd: int, offset: int, length: int) -> bool:
    """Give the blocks of a range back; False where the file system cannot."""
    flags = FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
    return bool(_libc.fallocate(fd, flags, offset, length) == 0)


def runs(slots: NDArray[np.uint32]) -> list[tuple[int, int]]:
    """Slot numbers as (first, count) runs of neighbours, ascending."""
    if not slots.size:
        return []
    order = np.sort(slots)
    cuts = np.flatnonzero(np.diff(order) != 1) + 1
    starts = np.concatenate(([0], cuts))
    ends = np.concatenate((cuts, [order.size]))
    return [(int(order[a]), int(b - a)) for a, b in zip(starts, ends, strict=True)]


@dataclass(frozen=True, slots=True)
class KeptFile:
    """The file of the process before, as it described it. `size_bytes`: it is at least that long;
    `backed_bytes`: from the start, surely with memory behind them."""

    inode: int
    size_bytes: int
    backed_bytes: int


def check_ours(status: os.stat_result, mode: int, gid: int | None) -> str:
    """Why an open file is not as this process would have made it; empty if it is."""
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        return "it is no regular file of one name"
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}"
    if stat.S_IMODE(status.st_mode) != mode:
        return f"its mode is {stat.S_IMODE(status.st_mode):o}, not {mode:o}"
    if gid is not None and status.st_gid != gid:
        return f"it belongs to group {status.st_gid}, not {gid}"
    return ""


class ShmArena:
    """One shared-memory file. `kind` is `shm`; clients map `path` read-write (mode 0660)."""

    kind = "shm"

    def __init__(
        self,
        path: Path,
        maximum_bytes: int,
        *,
        mode: int = ARENA_MODE,
        gid: int | None = None,
        kept: KeptFile | None = None,
    ) -> None:
        """A new sparse file of `maximum_bytes` (rounded up to 4096) in place of what is there, or
        `kept`, grown to that. Raises ArenaError; a kept file that is not ours is left alone."""
        self.path = path
        self.size_bytes = align_up(max(maximum_bytes, ALIGNMENT))
        self._first = 0
        """Bytes at the start that have memory behind them, while there are no slots."""
        self.on_backed: Callable[[int], None] = lambda _: None
        """Called with the bytes from the start that surely have memory behind them: before they
        become fewer, after they became more."""
        self.fd = self._make(mode, gid) if kept is None else self._reopen(kept, mode, gid)
        try:
            self.bytes = map_shared(self.fd, self.size_bytes)
        except OSError as error:
            raise self._given_up(error) from error
        self._guard = guard(self.bytes)
        self.inode = os.fstat(self.fd).st_ino
        self._backed: NDArray[np.bool_] | None = None
        """The same per slot, from the first call that names slots on."""
        self._slot_bytes = 0

    def _make(self, mode: int, gid: int | None) -> int:
        path = self.path
        try:
            path.unlink(missing_ok=True)
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ArenaError(f"cannot make the arena {path}: {error.strerror}") from error
        try:
            os.ftruncate(self.fd, self.size_bytes)
            if gid is not None:
                os.fchown(self.fd, -1, gid)
            os.fchmod(self.fd, mode)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise self._given_up(error) from error
        return self.fd

    def _reopen(self, kept: KeptFile, mode: int, gid: int | None) -> int:
        path = self.path
        try:
            self.fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise ArenaError(f"cannot open the arena {path}: {error.strerror}") from error
        status = os.fstat(self.fd)
        problem = check_ours(status, mode, gid)
        if not problem and status.st_ino != kept.inode:
            problem = "it is another file than the page table was made for"
        if not problem and (status.st_size < kept.size_bytes or status.st_size % ALIGNMENT):
            problem = f"it has {status.st_size} bytes, not {kept.size_bytes}"
        if problem:
            os.close(self.fd)
            raise ArenaError(f"the arena {path.name} is not taken over: {problem}")
        try:
            if status.st_size < self.size_bytes:
                os.ftruncate(self.fd, self.size_bytes)
        except OSError as error:
            raise self._given_up(error) from error
        self.size_bytes = max(self.size_bytes, status.st_size)
        if status.st_blocks * 512 >= kept.backed_bytes:
            self._first = min(kept.backed_bytes, self.size_bytes) // ALIGNMENT * ALIGNMENT
        return self.fd

    def _given_up(self, error: OSError) -> ArenaError:
        os.close(self.fd)
        self.fd = -1
        return ArenaError(
            f"cannot make the arena {self.path} of {self.size_bytes} bytes: {error.strerror}"
        )

    def rows(self, slot_bytes: int) -> NDArray[np.uint8]:
        """The arena as (slots, slot_bytes), for batched copies. Rows without memory behind them
        must not be written."""
        count = self.size_bytes // slot_bytes
        return self.bytes[: count * slot_bytes].reshape(count, slot_bytes)

    def back(self, offset: int, length: int, progress: Progress = unseen) -> None:
        """Put memory behind a range, in steps; all or nothing. Raises ArenaError when there is
        not enough, with the size that was asked for."""
        if offset + length > self.size_bytes:
            raise ArenaError(
                f"the arena {self.path.name} ends at {self.size_bytes} bytes, {offset + length}"
                " were asked for; restart the agent with more memory, or ask for less"
            )
        done = offset
        while done < offset + length:
            step = min(BACK_STEP, offset + length - done)
            try:
                os.posix_fallocate(self.fd, done, step)
            except OSError as error:
                if error.errno == errno.EINTR:
                    continue
                if done > offset:
                    punch_hole(self.fd, offset, done - offset)
                raise ArenaError(
                    f"no memory for {length} bytes of {self.path.name} in {self.path.parent}:"
                    f" {error.strerror}; make the tier smaller or the tmpfs larger"
                ) from error
            done += step
            progress()

    def back_slots(
        self, slots: NDArray[np.uint32], slot_bytes: int, progress: Progress = unseen
    ) -> None:
        """Put memory behind these slots where there is none, all or nothing. Raises ArenaError."""
        backed = self._slots_backed(slot_bytes)
        slots = slots[~backed[slots]]
        done: list[tuple[int, int]] = []
        try:
            for first, count in runs(slots):
                self.back(first * slot_bytes, count * slot_bytes, progress)
                done.append((first, count))
        except ArenaError:
            for first, count in done:
                punch_hole(self.fd, first * slot_bytes, count * slot_bytes)
            raise
        backed[slots] = True
        self._tell()

    def keep_slots(self, slots: NDArray[np.uint32], slot_bytes: int) -> int:
        """A kept file's slots with pages, before any other call that names slots: memory is behind
        them, and behind nothing else past the bytes that surely have it. How many slots those
        bytes are. Raises ArenaError."""
        whole = self._first // slot_bytes
        backed = self._slots_backed(slot_bytes)
        self.back_slots(slots, slot_bytes)
        for first, count in runs(np.flatnonzero(~backed[whole:]).astype(np.uint32)):
            punch_hole(self.fd, (whole + first) * slot_bytes, count * slot_bytes)
        punch_hole(self.fd, backed.size * slot_bytes, self.size_bytes)
        return whole

    @property
    def backed_prefix(self) -> int:
        """Bytes from the start that surely have memory behind them."""
        if self._backed is None:
            return self._first
        whole = self._backed.size if self._backed.all() else int(self._backed.argmin())
        return whole * self._slot_bytes

    def _tell(self) -> None:
        self.on_backed(self.backed_prefix)

    def punch(self, slots: NDArray[np.uint32], slot_bytes: int) -> None:
        """Give the memory behind these slots back."""
        self._slots_backed(slot_bytes)[slots] = False
        self._tell()
        for first, count in runs(slots):
            punch_hole(self.fd, first * slot_bytes, count * slot_bytes)

    def _slots_backed(self, slot_bytes: int) -> NDArray[np.bool_]:
        if self._backed is None:
            self._backed = np.zeros(self.size_bytes // slot_bytes, dtype=bool)
            self._backed[: self._first // slot_bytes] = True
            self._slot_bytes = slot_bytes
        return self._backed

    def start_over(self) -> None:
        """Forget the slots, for slots of another size: the memory that lies behind them without a
        gap from the start on is kept, the rest is given back."""
        if self._backed is not None:
            gaps = np.flatnonzero(~self._backed)
            whole = int(gaps[0]) if gaps.size else self._backed.size
            self._first, self._backed = whole * self._slot_bytes, None
            self._tell()
            punch_hole(self.fd, self._first, self.size_bytes - self._first)

    def back_first(self, length: int, progress: Progress = unseen) -> None:
        """Put memory behind the first `length` bytes, before there are slots. Raises ArenaError."""
        if length > self._first:
            self.back(self._first, length - self._first, progress)
            self._first = length
            self._tell()

    def keep_first(self, length: int) -> None:
        """Give back the memory behind all but the first `length` bytes, before there are slots."""
        start = align_up(length)
        if start < self._first:
            self._first = start
            self._tell()
            punch_hole(self.fd, start, self.size_bytes - start)

    def collapse(self, length: int, progress: Progress = unseen) -> bool:
        """Ask for huge pages behind the first `length` bytes; best effort. True if granted.

        It copies memory, seconds for each few GiB. `mmap.madvise` holds the interpreter's lock
        meanwhile, which would stop the cache thread and with it every engine; the call of the C
        library does not."""
        length = min(length, self.size_bytes) // HUGE_PAGE * HUGE_PAGE
        start = self.bytes.ctypes.data
        for done in range(0, length, BACK_STEP):
            step = min(BACK_STEP, length - done)
            if _libc.madvise(start + done, step, MADV_COLLAPSE):
                return False
            progress()
        return length > 0

    @property
    def lost_pages(self) -> int:
        """Pages of 4 KiB that a client took away by cutting the file short, and that this process
        touched since: they read as zeros, so a checksum fails. Always 0 without the extension,
        where the first of them ends the process."""
        return 0 if self._guard is None else self._guard.faults

    @property
    def cut_bytes(self) -> int:
        """Bytes by which the file is shorter than it was made: a client cut it."""
        if self.fd < 0:
            return 0
        return max(0, self.size_bytes - os.fstat(self.fd).st_size)

    @property
    def backed_bytes(self) -> int:
        """Memory behind the file right now."""
        return os.fstat(self.fd).st_blocks * 512

    def close(self, *, keep: bool = False) -> None:
        """Remove the file, or leave it to the next process (`keep`). Clients that mapped it keep
        their mapping."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            if not keep:
                self.path.unlink(missing_ok=True)


def open_device_arena(info: Any) -> Any:
    """A client's view of a `cuda` arena (`storage.core.ArenaInfo`): indexed by a byte slice that
    stays inside one chunk, it gives a uint8 tensor."""
    from kvtier_agent.cache.arena_cuda import DeviceView

    return DeviceView(info)
