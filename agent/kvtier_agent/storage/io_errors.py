"""Each fault of a drive counted once, where it comes out of the system call.

What follows from a fault is counted elsewhere (pages that were not moved, quarantine, volumes that
rest): one may cost a batch of pages, another none. Here the sum over all is the number of faults,
so that a drive that errs is seen even where nothing came of it.

`CountedIO` stands before the `FileIO` in use. It sees errors and calls that take long; that a
transfer was short, or brought other bytes than were written, only its caller knows, and says so
with `noticed`.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kvtier_agent.storage.fileio import FileIO, NoAnswerError

T = TypeVar("T")

SLOW_SECONDS = 1.0
"""A call that takes longer counts as slow: ten times what a busy drive takes for a batch."""

NAMED = ("EIO", "ENOSPC", "EROFS", "EDQUOT", "ENOENT", "EINVAL", "EMFILE", "ENOMEM", "EACCES")
"""Errors that are counted by name; every other one is `other`, which bounds the labels."""


class IOErrors:
    """(operation, fault) -> how often. Thread-safe. Faults: an error's name of `NAMED`, `other`,
    `short` (fewer bytes than asked for), `checksum` (pages), `slow` (a call, failed or not, or
    given up)."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def add(self, operation: str, fault: str, count: int = 1) -> None:
        with self._lock:
            self._counts[operation, fault] += count

    def failed_late(self, operation: str, error: OSError) -> None:
        """A call that was given up, and counted as slow, has ended in this error."""
        if not isinstance(error, FileNotFoundError):
            self.add(operation, name_of(error))

    def counts(self) -> dict[tuple[str, str], int]:
        """A copy."""
        with self._lock:
            return dict(self._counts)


def name_of(error: OSError) -> str:
    """The fault that an error counts as."""
    name = errno.errorcode.get(error.errno or 0, "")
    return name if name in NAMED else "other"


class CountedIO(FileIO):
    """`io`, counted in `errors`."""

    def __init__(
        self,
        io: FileIO,
        errors: IOErrors,
        *,
        slow_seconds: float = SLOW_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.io = io
        self.errors = errors
        self._slow_seconds = slow_seconds
        self._clock = clock

    def noticed(self, operation: str, fault: str, count: int = 1) -> None:
        self.errors.add(operation, fault, count)

    def ring(self, arena: Any, headers: Any = None, **settings: int) -> Any:
        return self.io.ring(arena, headers, **settings)

    def _call(self, operation: str, call: Callable[..., T], *arguments: Any) -> T:
        begin, given_up = self._clock(), False
        try:
            return call(*arguments)
        except NoAnswerError as error:  # a call that was not made is no fault of its own
            given_up = error.waited
            raise
        except OSError as error:
            self.errors.add(operation, name_of(error))
            raise
        finally:
            if given_up or self._clock() - begin > self._slow_seconds:
                self.errors.add(operation, "slow")

    def open(self, path: Path, *, create: bool, direct: bool) -> tuple[int, bool]:
        return self._call("open", lambda: self.io.open(path, create=create, direct=direct))

    def write(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        return self._call("write", self.io.write, fd, buffers, offset)

    def read(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        return self._call("read", self.io.read, fd, buffers, offset)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        self._call("allocate", self.io.allocate, fd, offset, length)

    def punch(self, fd: int, offset: int, length: int) -> bool:
        return self._call("punch", self.io.punch, fd, offset, length)

    def flush(self, fd: int) -> None:
        self._call("flush", self.io.flush, fd)

    def flush_folder(self, folder: Path) -> None:
        self._call("flush", self.io.flush_folder, folder)

    def truncate(self, fd: int, length: int) -> None:
        self._call("truncate", self.io.truncate, fd, length)

    def size(self, fd: int) -> int:
        return self.io.size(fd)

    def close(self, fd: int) -> None:
        self._call("close", self.io.close, fd)

    def rename(self, source: Path, target: Path) -> None:
        self._call("rename", self.io.rename, source, target)

    def unlink(self, path: Path) -> None:
        try:
            self.io.unlink(path)
        except (FileNotFoundError, NoAnswerError):
            raise  # it is gone, as was wanted; or it will be
        except OSError as error:
            self.errors.add("unlink", name_of(error))
            raise

    def names(self, folder: Path) -> list[str]:
        return self._call("list", self.io.names, folder)

    def allocated(self, fd: int) -> int:
        return self.io.allocated(fd)

    def free(self, folder: Path) -> tuple[int, int]:
        return self._call("statvfs", self.io.free, folder)
