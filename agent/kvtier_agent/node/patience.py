"""A call that may hang, waited for only so long.

A file system that hangs keeps whoever calls it in the kernel, where nothing ends that. So the call
is made by a thread of its own, and whoever wants it made goes on after a while. (For the volumes of
NVMe, with many callers at a time, there is `storage.patient_io`.)
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable

__all__ = ["Patience"]


class Patience:
    """One call at a time; not for several threads."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def do(self, call: Callable[[], None], seconds: float) -> None:
        """Makes the call; raises what it raises, and OSError (ETIMEDOUT) where it takes longer than
        ``seconds``. Then it goes on, and no other is made before it has ended."""
        if self._thread is not None and self._thread.is_alive():
            raise _no_answer()
        failed: list[BaseException] = []

        def make() -> None:
            try:
                call()
            except BaseException as error:  # it is the caller's, whatever it is
                failed.append(error)

        self._thread = threading.Thread(target=make, name="file-system", daemon=True)
        self._thread.start()
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise _no_answer()
        if failed:
            raise failed[0]


def _no_answer() -> OSError:
    return OSError(errno.ETIMEDOUT, "the disk does not answer")
