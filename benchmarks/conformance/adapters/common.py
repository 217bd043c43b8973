"""What the adapters share: pages that follow from their numbers, and orders read as JSON lines.

An adapter runs in the environment of its system and needs numpy alone. It gets one order a line on
standard input and answers each with one line; what libraries print goes to standard error. The
orders are the methods of `Adapter`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np

PAGE_BYTES = 1 << 20
PATIENCE_SECONDS = 3.0
"""How long a page that was refused is offered again. The same for every system: some make room by
the second, and pages come here faster than any engine makes them."""


def content(number: int) -> np.ndarray:
    """The bytes of a page; random, so that no compression helps and none is equal to another."""
    return np.random.default_rng(number).integers(0, 256, PAGE_BYTES, dtype=np.uint8)


def digest(number: int) -> bytes:
    """32 bytes that name a page."""
    return hashlib.blake2b(b"page %d" % number, digest_size=32).digest()


class Adapter:
    """A system as the behaviours see it. Answers are dictionaries; `nothing` = a reason why the
    system has no such thing."""

    def open(self, folder: Path, memory: Path, dram_pages: int, disk_pages: int) -> dict[str, Any]:
        """Start with so much DRAM, and a cap of so many pages' bytes on disk, if it takes one.
        `folder` for files, `memory` for what outlives a process in shared memory."""
        raise NotImplementedError

    def put(self, first: int, count: int) -> dict[str, Any]:
        """`stored`: the numbers of the pages that the system says it took."""
        raise NotImplementedError

    def get(self, numbers: list[int]) -> dict[str, Any]:
        """`right`, `wrong`, `missing`: numbers of pages, each asked for by itself."""
        raise NotImplementedError

    def settle(self) -> dict[str, Any]:
        """Return when nothing is on its way to disk."""
        raise NotImplementedError

    def kill_eviction(self) -> dict[str, Any]:
        """End the thread that makes room in DRAM. `what`: how."""
        raise NotImplementedError

    def health(self) -> dict[str, Any]:
        """What its liveness probe says: `healthy`, and `says` in words."""
        raise NotImplementedError

    def kill_clients(self, times: int, first: int, count: int) -> dict[str, Any]:
        """`times` clients, each killed between announcing `count` pages from `first` on and
        finishing them. `killed`, and `found`: of those pages, how many are served afterwards."""
        raise NotImplementedError

    def close(self) -> dict[str, Any]:
        """An orderly stop."""
        raise NotImplementedError


def sort_out(read: Any, numbers: list[int]) -> dict[str, Any]:
    """An answer to `get`; `read(number)` gives bytes, or None for a miss."""
    answer: dict[str, Any] = {"right": [], "wrong": [], "missing": []}
    for number in numbers:
        found = read(number)
        if found is None:
            answer["missing"].append(number)
        else:
            same = np.array_equal(np.frombuffer(found, dtype=np.uint8), content(number))
            answer["right" if same else "wrong"].append(number)
    return answer


def serve(adapter: Adapter) -> None:
    """Obey until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        order = json.loads(line)
        name = order.pop("do")
        order |= {name: Path(order[name]) for name in ("folder", "memory") if name in order}
        try:
            answer = getattr(adapter, name)(**order)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    answers.close()
    os._exit(0)  # libraries may have threads that never end
