"""Calls that change a file system, waited for only so long.

A file system that hangs (frozen, its drive gone) keeps whoever calls it in the kernel, where
nothing ends that. So these calls are made by threads of the file system's own, as many as there are
callers at a time, and whoever wants one waits `PATIENCE_SECONDS`, then gets ETIMEDOUT. Until what
was given up has ended, all others get it at once: no more threads are kept, and nothing that is
asked later overtakes it. Only removals are made then, by and by. Reads are made by the caller:
nothing may arrive in memory that is somebody else's by then.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvtier_agent.storage.fileio import FileIO, NoAnswerError

PATIENCE_SECONDS = 10.0
"""More than a busy drive takes for a flush, less than health allows a thread."""


Late = Callable[[str, OSError], None]


class _Call:
    """`late`: done with its answer when nobody waits for it any more; `removes`: this path, and so
    it is made even then."""

    def __init__(
        self, name: str, call: Callable[[], Any], late: Callable[[Any], None], removes: Path | None
    ) -> None:
        self.name, self.call, self.late, self.removes = name, call, late, removes
        self.answer: Any = None
        self.error: BaseException | None = None
        self.over = threading.Event()
        self.given_up = False


class _Lane:
    """A thread that makes calls of one file system."""

    def __init__(self, home: _FileSystem) -> None:
        self.calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._home = home
        threading.Thread(target=self._run, name="file-system", daemon=True).start()

    def _run(self) -> None:
        while (call := self.calls.get()) is not None:
            try:
                if not call.given_up or call.removes is not None:
                    call.answer = call.call()
            except BaseException as error:  # it is the caller's, whatever it is
                call.error = error
            if self._home.ended(self, call):
                continue
            if call.answer is not None:
                with contextlib.suppress(OSError):
                    call.late(call.answer)
            if isinstance(call.error, OSError):
                self._home.failed_late(call.name, call.error)


class _FileSystem:
    """Thread-safe. Calls are queued, given up and ended holding `_lock`."""

    def __init__(self, failed_late: Late) -> None:
        self.failed_late = failed_late
        self._lock = threading.Lock()
        self._idle: list[_Lane] = []
        self._given_up = 0
        """Calls that nobody waits for, and that have not ended."""
        self._stuck: _Lane | None = None
        self._removals: set[Path] = set()
        """That wait for it: one each, however often they are asked for."""
        self._over = False

    def end(self) -> None:
        """No threads any more, but those that are at a call."""
        with self._lock:
            self._over = True
            for lane in self._idle:
                lane.calls.put(None)

    def do(self, call: _Call, seconds: float) -> Any:
        with self._lock:
            if self._given_up and self._stuck is not None:
                if call.removes is not None and call.removes not in self._removals:
                    self._removals.add(call.removes)
                    call.given_up = True
                    self._given_up += 1
                    self._stuck.calls.put(call)
                raise NoAnswerError(waited=False)
            lane = self._idle.pop() if self._idle and not self._over else _Lane(self)
            lane.calls.put(call)
        if not call.over.wait(seconds):
            with self._lock:
                if not call.over.is_set():
                    call.given_up = True
                    self._given_up += 1
                    self._stuck = lane
                    raise NoAnswerError(waited=True)
        if call.error is not None:
            raise call.error
        return call.answer

    def ended(self, lane: _Lane, call: _Call) -> bool:
        """Does anybody wait for its answer?"""
        with self._lock:
            call.over.set()
            self._given_up -= call.given_up
            if call.removes is not None:
                self._removals.discard(call.removes)
            if self._over and lane.calls.empty():
                lane.calls.put(None)
            elif lane.calls.empty() and lane not in self._idle:
                self._idle.append(lane)
            return not call.given_up


class PatientIO(FileIO):
    """`io`, whose calls may be given up. Thread-safe."""

    def __init__(
        self,
        io: FileIO,
        *,
        seconds: float = PATIENCE_SECONDS,
        failed_late: Late = lambda name, error: None,
    ) -> None:
        """`failed_late`: called, on a thread of its own, when a call that was given up ends in an
        error; with what it was for, and that."""
        self.io = io
        self._failed_late = failed_late
        self._seconds = seconds
        self._systems: dict[int, _FileSystem] = {}
        self._making = threading.Lock()

    def end(self) -> None:
        """No threads any more, until the next call."""
        with self._making:
            systems, self._systems = list(self._systems.values()), {}
        for system in systems:
            system.end()

    def _do(
        self,
        device: int,
        name: str,
        call: Callable[[], Any],
        late: Callable[[Any], None] = lambda _: None,
        *,
        removes: Path | None = None,
    ) -> Any:
        with self._making:
            system = self._systems.get(device)
            if system is None:
                system = self._systems[device] = _FileSystem(self._failed_late)
        return system.do(_Call(name, call, late, removes), self._seconds)

    def _with(self, fd: int, call: Callable[..., Any], *arguments: Any) -> Any:
        return self._do(os.fstat(fd).st_dev, call.__name__, lambda: call(fd, *arguments))

    def open(self, path: Path, *, create: bool, direct: bool) -> tuple[int, bool]:
        if not create:
            return self.io.open(path, create=create, direct=direct)
        opened: tuple[int, bool] = self._do(
            path.parent.stat().st_dev,
            "open",
            lambda: self.io.open(path, create=True, direct=direct),
            lambda made: self.io.close(made[0]),
        )
        return opened

    def write(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        return int(self._with(fd, self.io.write, buffers, offset))

    def read(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        return self.io.read(fd, buffers, offset)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        self._with(fd, self.io.allocate, offset, length)

    def punch(self, fd: int, offset: int, length: int) -> bool:
        return bool(self._with(fd, self.io.punch, offset, length))

    def flush(self, fd: int) -> None:
        self._with(fd, self.io.flush)

    def flush_folder(self, folder: Path) -> None:
        self._do(folder.stat().st_dev, "flush", lambda: self.io.flush_folder(folder))

    def truncate(self, fd: int, length: int) -> None:
        self._with(fd, self.io.truncate, length)

    def size(self, fd: int) -> int:
        return self.io.size(fd)

    def close(self, fd: int) -> None:
        self.io.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        device = source.parent.stat().st_dev
        self._do(device, "rename", lambda: self.io.rename(source, target))

    def unlink(self, path: Path) -> None:
        """Happens even when it is given up, before anything that is asked for later."""
        device = path.parent.stat().st_dev
        self._do(device, "unlink", lambda: self.io.unlink(path), removes=path)

    def names(self, folder: Path) -> list[str]:
        return self.io.names(folder)

    def allocated(self, fd: int) -> int:
        return self.io.allocated(fd)

    def free(self, folder: Path) -> tuple[int, int]:
        return self.io.free(folder)

    def noticed(self, operation: str, fault: str, count: int = 1) -> None:
        self.io.noticed(operation, fault, count)

    def ring(self, arena: Any, headers: Any = None, **settings: int) -> Any:
        return self.io.ring(arena, headers, **settings)
