"""A journal on a file system, written to and broken, for tests."""

from __future__ import annotations

import numpy as np
from kvtier_agent.storage.fileio import FileIO
from kvtier_agent.storage.journal_files import JournalSettings
from kvtier_agent.storage.journal_format import Identity
from kvtier_agent.storage.journal_reader import read_journal
from kvtier_agent.storage.segment import PageStamp

IDENTITY = Identity(b"f" * 16, 4, 12288)
SETTINGS = JournalSettings(least_log_bytes=4096)


class CrashError(BaseException):
    """The process ends here."""


class CountingIO(FileIO):
    """Every call that changes the disk may fail: `at` is the number of calls until `error`."""

    def __init__(self):
        self.calls = []
        self.at = None
        self.error = None
        self.short = False

    def _step(self, name):
        self.calls.append(name)
        if self.at is not None:
            self.at -= 1
            if self.at < 0:
                raise self.error

    def write(self, fd, buffers, offset):
        self._step("write")
        if self.short:
            return super().write(fd, [bytes(buffers[0])[:10]], offset)
        return super().write(fd, buffers, offset)

    def allocate(self, fd, offset, length):
        self._step("allocate")
        super().allocate(fd, offset, length)

    def truncate(self, fd, length):
        self._step("truncate")
        super().truncate(fd, length)

    def flush(self, fd):
        self._step("flush")
        super().flush(fd)

    def flush_folder(self, folder):
        self._step("flush_folder")
        super().flush_folder(folder)

    def rename(self, source, target):
        self._step("rename")
        super().rename(source, target)

    def unlink(self, path):
        self._step("unlink")
        super().unlink(path)


def put(journal, slots, *, lasting=False, generation=0, sequence=0):
    slots = np.array(slots, dtype=np.uint32)
    keys = np.repeat(slots.astype(np.uint8)[:, None], 16, axis=1)
    stamp = PageStamp(keys, keys, slots, slots.astype(np.uint64))
    generations = np.full(len(slots), generation, dtype=np.uint32)
    journal.put(slots, generations, stamp, sequence, lasting=lasting)


def put_until_full(journal):
    for _ in range(1000):
        put(journal, range(4))


def slots_in(mount):
    found = read_journal(mount, IDENTITY, FileIO())
    return [s for part in found.pages for s in part["slot"].tolist()]
