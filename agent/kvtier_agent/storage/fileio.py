"""The system calls of storage, in one class: the edge where tests inject faults."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtier_agent import native
from kvtier_agent.cache.arena import punch_hole

IOV_MAX = 1024


def allow_many_files() -> None:
    """Raise this process's soft limit on open files to the hard one: each segment of NVMe keeps
    its file open, four for every GiB or 64 in a small tier, and the usual soft limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class NoAnswerError(OSError):
    """A call was given up (`waited`), or not made because another one was."""

    def __init__(self, *, waited: bool) -> None:
        super().__init__(errno.ETIMEDOUT, "the drive does not answer")
        self.waited = waited


class FileIO:
    """Thin; every method raises OSError as the kernel says it."""

    def open(self, path: Path, *, create: bool, direct: bool) -> tuple[int, bool]:
        """A descriptor (mode 0600 when created) and whether it bypasses the page cache. O_DIRECT
        is used where the file system has it."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        if direct:
            try:
                return os.open(path, flags | os.O_DIRECT, 0o600), True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        return os.open(path, flags, 0o600), False

    def write(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        """Bytes written; may be short."""
        return os.pwritev(fd, buffers, offset)

    def read(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        """Bytes read; short at the end of the file."""
        return os.preadv(fd, buffers, offset)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        os.posix_fallocate(fd, offset, length)

    def punch(self, fd: int, offset: int, length: int) -> bool:
        return punch_hole(fd, offset, length)

    def flush(self, fd: int) -> None:
        os.fdatasync(fd)

    def flush_folder(self, folder: Path) -> None:
        """Make the names in a folder last, where the file system can be told to."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        finally:
            os.close(fd)

    def truncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def size(self, fd: int) -> int:
        """Bytes up to the end of the file."""
        return os.fstat(fd).st_size

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """In one folder; `target` is replaced, whole, if it exists."""
        source.replace(target)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def names(self, folder: Path) -> list[str]:
        """The names in a folder, sorted."""
        return sorted(os.listdir(folder))  # noqa: PTH208 - names are all that is wanted

    def allocated(self, fd: int) -> int:
        """Bytes of blocks the file really takes."""
        return os.fstat(fd).st_blocks * 512

    def free(self, folder: Path) -> tuple[int, int]:
        """(bytes an ordinary user may still write, bytes in all) of the file system."""
        info = os.statvfs(folder)
        return info.f_bavail * info.f_frsize, info.f_blocks * info.f_frsize

    def noticed(self, operation: str, fault: str, count: int = 1) -> None:
        """What only the caller of a transfer can tell went wrong with it (`io_errors`)."""

    def ring(self, arena: Any, headers: Any = None, **settings: int) -> Any:
        """A ring for transfers between files and these buffers (`native.ring`). This class has
        none, so that whoever changes what its calls do has changed all there is."""
        raise OSError(errno.ENOSYS, "transfers go by calls here")


class RingIO(FileIO):
    """The same, and rings of io_uring where there are any."""

    def ring(self, arena: Any, headers: Any = None, **settings: int) -> Any:
        """Raises OSError where there can be none."""
        return native.ring(arena, headers, **settings)
