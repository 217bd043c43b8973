"""The scrub after a restart: pages that were taken over are read in the background.

They serve from the first moment; every reader checks its own copy anyway. The scrub finds damage
before a reader meets it, so that the page is computed and stored again. It reads beside the cache
thread, without a lock: a record whose `seq` is even and the same before and after had its slot all
the while. What does not match its checksum is told to the cache thread, which looks at `seq` again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.page_table import PageTable
from kvtier_agent.cache.record import READ_L1, Rows
from kvtier_agent.cache.units import PageForm, form_of
from kvtier_agent.storage.core import Core
from kvtier_agent.supervise import Heart

BATCH_BYTES: Final = 8 << 20
BATCH_PAGES: Final = 256


@dataclass(frozen=True, slots=True, eq=False)
class Checked:
    """`read`: pages that were read and did not change meanwhile. `rows`, `seqs`: the bad ones, and
    the state of their records."""

    read: int
    rows: Rows
    seqs: NDArray[np.uint32]


def check(
    table: PageTable, memory: NDArray[np.uint8], form: PageForm, rows: Rows,
    keys: NDArray[np.uint64],
) -> Checked:  # fmt: skip
    """Read those of `rows` that still hold the page of that key (n, 2) in L1, whose slots are
    `memory`, (slots, slot_bytes)."""
    seqs = table.seq[rows]
    there = (seqs % 2 == 0) & READ_L1[table.state[rows]] & (table.key[rows] == keys).all(axis=1)
    rows, seqs = rows[there], seqs[there]
    slots, sizes, sums = table.l1_slot[rows], table.size[rows], table.checksum[rows]
    # A record that was changed just now may name a slot that is not; it does not count below.
    inside = (slots < len(memory)) & (sizes == form.page_bytes)
    units = form.of_rows(memory, slots[inside])
    right = np.ones(len(rows), dtype=bool)
    right[inside] = form.checksums(units) == sums[inside]
    if form.units > 1:  # without them no part of the page can be had by itself
        right[inside] &= (form.left(memory, slots[inside]) == units).all(axis=1)
    held = inside & (table.seq[rows] == seqs)
    bad = held & ~right
    return Checked(int(held.sum()), rows[bad], seqs[bad])


class Scrub:
    """Over the pages that one `Core` took over. `run` is a supervised loop; a new run goes on where
    the last one ended. Make it before the cache thread runs."""

    def __init__(
        self,
        core: Core,
        post: Callable[[Callable[[], Any]], Any],
        *,
        percent: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`post`: runs a call on the cache thread, later. `percent`: share of one core's time."""
        self._core = core
        self._post = post
        self._rest = 100 / percent - 1
        self._clock = clock
        self._rows = core.memory.rows
        self._keys = core.table.key[self._rows].copy()
        self._next = 0
        geometry = core.memory.geometry
        self._geometry = geometry
        slot_bytes = geometry.slot_bytes if geometry is not None else 1
        self._step = max(1, min(BATCH_PAGES, BATCH_BYTES // slot_bytes))

    @property
    def left(self) -> int:
        """Pages not yet read."""
        return len(self._rows) - self._next

    def run(self, heart: Heart) -> None:
        """Until the heart is asked to stop; idle once all pages were read."""
        while not heart.stopping.is_set():
            heart.beat()
            if not self.left:
                heart.wait(60.0)
                continue
            started = self._clock()
            self.step()
            heart.wait((self._clock() - started) * self._rest)

    def step(self) -> None:
        """Read one batch and tell the cache thread."""
        part = slice(self._next, self._next + self._step)
        rows, keys = self._rows[part], self._keys[part]
        geometry = self._geometry
        assert geometry is not None  # whose pages were taken over
        memory = self._core.l1.rows(geometry.slot_bytes)
        done = check(self._core.table, memory, form_of(geometry), rows, keys)
        self._post(lambda: self._core.cache.scrubbed(done.read, done.rows, done.seqs))
        self._next += len(rows)
