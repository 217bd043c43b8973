"""A disk that remembers, and what may be left of it when the power goes.

`RecordingIO` is a `FileIO` over a real folder that writes down every change with its bytes.
`Cutter` walks that trace and builds, at any point of it, a folder as a drive may show it after a
power cut:

    flushed data            is there
    flushed folder          has its names
    anything not flushed    each change on its own is there, is missing, or (writes) is there in
                            some of its 512-byte sectors: order between changes means nothing
    the change cut into     a write is torn at a sector, anything else has happened or has not

That is more than file systems allow themselves (they keep the order of names, for example), so what
passes here rests on no courtesy of theirs.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier_agent.storage.fileio import FileIO

SECTOR = 512
BLOCK = 4096


@dataclass(frozen=True, slots=True)
class Change:
    """One entry of the trace. `what`: write, allocate, punch, truncate, flush (of `file`, with
    `offset` and `length`); link, unlink, rename, folder (names); note (of the workload)."""

    what: str
    file: int = 0
    offset: int = 0
    length: int = 0
    data: bytes = b""
    name: str = ""
    target: str = ""
    note: Any = None


CUTTABLE = ("write", "allocate", "punch", "truncate", "flush", "link", "unlink", "rename", "folder")


class RecordingIO(FileIO):
    """Records what happens to the files of `folder`; all else passes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trace: list[Change] = []
        self._files: dict[str, int] = {}
        self._open: dict[int, int] = {}
        self._next = 1
        if folder.is_dir():
            for name in self.names(folder):
                self._files[name] = self._next
                data = (folder / name).read_bytes()
                self.trace += [
                    Change("link", self._next, name=name),
                    Change("write", self._next, 0, len(data), data),
                    Change("flush", self._next),
                ]
                self._next += 1
            self.trace.append(Change("folder"))

    def note(self, note: Any) -> None:
        self.trace.append(Change("note", note=note))

    def open(self, path: Path, *, create: bool, direct: bool) -> tuple[int, bool]:
        if path.parent != self.folder:
            return super().open(path, create=create, direct=direct)
        fresh = not path.exists()
        fd, bypasses = super().open(path, create=create, direct=direct)
        if fresh:
            self._files[path.name] = self._next
            self.trace.append(Change("link", self._next, name=path.name))
            self._next += 1
        self._open[fd] = self._files[path.name]
        return fd, bypasses

    def close(self, fd: int) -> None:
        self._open.pop(fd, None)
        super().close(fd)

    def write(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        data = b"".join(bytes(memoryview(b)) for b in buffers)
        self._note(fd, "write", offset, len(data), data)
        return super().write(fd, buffers, offset)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        self._note(fd, "allocate", offset, length)
        super().allocate(fd, offset, length)

    def punch(self, fd: int, offset: int, length: int) -> bool:
        self._note(fd, "punch", offset, length)
        return super().punch(fd, offset, length)

    def truncate(self, fd: int, length: int) -> None:
        self._note(fd, "truncate", 0, length)
        super().truncate(fd, length)

    def flush(self, fd: int) -> None:
        super().flush(fd)
        self._note(fd, "flush")

    def flush_folder(self, folder: Path) -> None:
        super().flush_folder(folder)
        if folder == self.folder:
            self.trace.append(Change("folder"))

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        if source.parent == self.folder:
            self._files[target.name] = self._files.pop(source.name)
            self.trace.append(Change("rename", name=source.name, target=target.name))

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        if path.parent == self.folder:
            self._files.pop(path.name, None)
            self.trace.append(Change("unlink", name=path.name))

    def _note(
        self, fd: int, what: str, offset: int = 0, length: int = 0, data: bytes = b""
    ) -> None:
        if fd in self._open:
            self.trace.append(Change(what, self._open[fd], offset, length, data))


@dataclass(slots=True)
class _Image:
    """A file's bytes, and which of its blocks there are."""

    data: bytearray = field(default_factory=bytearray)
    blocks: set[int] = field(default_factory=set)

    def copy(self) -> _Image:
        return _Image(bytearray(self.data), set(self.blocks))

    def apply(self, change: Change, sectors: list[bool] | None = None) -> None:
        """`sectors`: of a write, which of its sectors arrive."""
        end = change.offset + change.length
        if change.what == "truncate":
            self._resize(change.length)
        elif change.what == "allocate":
            self._resize(max(end, len(self.data)))
            self.blocks.update(range(change.offset // BLOCK, -(-end // BLOCK)))
        elif change.what == "punch":
            inside = min(end, len(self.data)) - change.offset
            if inside > 0:
                self.data[change.offset : change.offset + inside] = bytes(inside)
            self.blocks -= set(range(-(-change.offset // BLOCK), end // BLOCK))
        elif change.what == "write":
            self._resize(max(end, len(self.data)))
            self.blocks.update(range(change.offset // BLOCK, -(-end // BLOCK)))
            if sectors is None:
                self.data[change.offset : end] = change.data
                return
            for i, arrives in enumerate(sectors):
                if arrives:
                    part = change.data[i * SECTOR : (i + 1) * SECTOR]
                    start = change.offset + i * SECTOR
                    self.data[start : start + len(part)] = part

    def save(self, path: Path) -> None:
        with path.open("wb") as file:
            os.ftruncate(file.fileno(), len(self.data))
            for block in sorted(self.blocks):
                piece = self.data[block * BLOCK : (block + 1) * BLOCK]
                os.pwrite(file.fileno(), piece, block * BLOCK)

    def _resize(self, size: int) -> None:
        if size > len(self.data):
            self.data += bytes(size - len(self.data))
        elif size < len(self.data):
            del self.data[size:]
            self.blocks = {b for b in self.blocks if b * BLOCK < size}


class Cutter:
    """Walks a trace from its beginning, change by change."""

    def __init__(self, trace: Sequence[Change]) -> None:
        self.trace = trace
        self.at = 0
        """Changes that were made before the cut."""
        self._flushed: dict[int, _Image] = {}
        self._pending: dict[int, list[Change]] = {}
        self._names: dict[str, int] = {}
        self._pending_names: list[Change] = []

    def forward(self) -> Change:
        """Make the next change; it."""
        change = self.trace[self.at]
        self.at += 1
        if change.what == "flush":
            image = self._flushed.setdefault(change.file, _Image())
            for one in self._pending.pop(change.file, ()):
                image.apply(one)
        elif change.what == "folder":
            for one in self._pending_names:
                _apply_name(self._names, one)
            self._pending_names.clear()
        elif change.what in ("link", "unlink", "rename"):
            self._pending_names.append(change)
        elif change.what != "note":
            self._pending.setdefault(change.file, []).append(change)
        return change

    def cut(self, chance: random.Random, folder: Path) -> None:
        """Fill `folder` (empty) as the drive may be when the power goes while the next change is
        under way."""
        names = dict(self._names)
        pending_names = list(self._pending_names)
        last = self.trace[self.at] if self.at < len(self.trace) else None
        if last is not None and last.what in ("link", "unlink", "rename"):
            pending_names.append(last)
        # How much of what was not flushed arrives differs from cut to cut: all, none, some.
        share = chance.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        for change in pending_names:
            if chance.random() < share:
                _apply_name(names, change)
        for name, file in names.items():
            image = self._flushed.get(file, _Image())
            pending = list(self._pending.get(file, ()))
            if last is not None and last.file == file and last.what not in ("flush", "link"):
                pending.append(last)
            if pending:
                image = image.copy()
            for change in pending:
                if change is last and change.what == "write":
                    sectors = -(-change.length // SECTOR)
                    whole = chance.randrange(sectors + 1)
                    image.apply(change, [i < whole for i in range(sectors)])
                elif chance.random() < share:
                    image.apply(change, self._some_sectors(change, chance))
            image.save(folder / name)

    @staticmethod
    def _some_sectors(change: Change, chance: random.Random) -> list[bool] | None:
        if change.what != "write" or chance.random() < 0.7:
            return None
        return [chance.random() < 0.5 for _ in range(-(-change.length // SECTOR))]


def _apply_name(names: dict[str, int], change: Change) -> None:
    if change.what == "link":
        names[change.name] = change.file
    elif change.what == "unlink":
        names.pop(change.name, None)
    elif change.name in names:
        names[change.target] = names.pop(change.name)
