"""Signals as something to wait for, none of which is lost.

A Python handler that sets an event can lose one: it runs on the main thread between two of its
steps, so a signal that comes while that thread is on its way into `Event.wait` finds the event's
lock taken (for ever), or is noticed by the next signal only; and one that the kernel hands to
another thread interrupts nobody. A byte in a pipe stays there until it is read.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Iterable

__all__ = ["Signals"]


class Signals:
    """From here on these signals do nothing but end `wait`: to the end of the process, for one
    that comes twice must not cut the orderly end short. Main thread only, one at a time."""

    def __init__(self, numbers: Iterable[signal.Signals]) -> None:
        self._numbers = frozenset(numbers)
        self._came: deque[signal.Signals] = deque()
        self._read_end, self._write_end = os.pipe()
        # The end that waits blocks; the one that a handler writes to must not.
        os.set_blocking(self._write_end, False)
        self._before_fd = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._before = {n: signal.signal(n, lambda *_: None) for n in self._numbers}

    def close(self) -> None:
        """What was installed before comes back (for tests)."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._before_fd)
        os.close(self._read_end)
        os.close(self._write_end)

    def wait(self) -> signal.Signals:
        """The next of them, at once if it came since the last call or since the beginning."""
        while not self._came:
            # Every signal with a Python handler writes its number, also those of others.
            numbers = os.read(self._read_end, 512)
            self._came += (signal.Signals(n) for n in numbers if n in self._numbers)
        return self._came.popleft()
