"""Quarantine of L2: a segment that held a bad or unreadable page is not used for new pages until it
has been tested from front to back (write, read back, compare), in steps.

The page itself is gone at once: it is out of the index, and the next put stores it anew elsewhere.
The other pages of its segment stay, verified as always when they are read; the test comes when the
segment is empty. One that fails is repeated, from the slot that failed on, ever more rarely: a
drive that was away for an hour gets its segments back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST_TEST_SECONDS = 5.0
LONGEST_PAUSE_SECONDS = 3600.0
GROWTH = 6.0
"""After each failure the next test is so many times later."""


@dataclass(slots=True)
class _Test:
    epoch: int
    due: float | None
    """None: a step is under way."""
    tries: int = 0
    slot: int = 0
    """The next to be tested, counted in its segment."""


@dataclass(slots=True)
class Quarantine:
    """The tests of suspect segments that are empty."""

    _tests: dict[int, _Test] = field(default_factory=dict)

    def add(self, now: float, segment: int, epoch: int) -> None:
        """A suspect segment is empty. `epoch`: of this use of its numbers."""
        self._tests[segment] = _Test(epoch, now + FIRST_TEST_SECONDS)

    def due(self, now: float) -> list[tuple[int, int, int]]:
        """Steps to take now: (segment, epoch, first slot in it)."""
        out = []
        for segment, test in self._tests.items():
            if test.due is not None and test.due <= now:
                test.due = None
                out.append((segment, test.epoch, test.slot))
        return out

    def next_due(self) -> float | None:
        return min((t.due for t in self._tests.values() if t.due is not None), default=None)

    def step(self, now: float, segment: int, epoch: int, good: int, *, ok: bool) -> None:
        """A step ended: `good` slots of it were good, and `ok` if none was bad."""
        test = self._tests.get(segment)
        if test is None or test.epoch != epoch:
            return
        test.slot += good
        if ok:
            test.due = now
        else:
            pause = FIRST_TEST_SECONDS * GROWTH ** min(test.tries + 1, 9)
            test.due = now + min(pause, LONGEST_PAUSE_SECONDS)
            test.tries += 1

    def end(self, segment: int, epoch: int) -> None:
        """The segment is good, or no longer there to be tested."""
        test = self._tests.get(segment)
        if test is not None and test.epoch == epoch:
            del self._tests[segment]
