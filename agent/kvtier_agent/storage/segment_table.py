"""The segments of an L2 by number, and the bytes of blocks that they take together.

The sum is kept, not made: every write asks for it, and a large tier has ten thousand segments. A
plain dictionary otherwise, changed by assignment, `pop` and `clear` alone; listing it is one step,
whatever other threads do.
"""

from __future__ import annotations

from kvtier_agent.storage.segment import BlockCount, Segment
from kvtier_agent.storage.volume import Volume

Held = tuple[Segment, Volume]


class SegmentTable(dict[int, Held]):
    """Thread-safe as a dictionary is."""

    def __init__(self) -> None:
        super().__init__()
        self._count = BlockCount()

    @property
    def bytes(self) -> int:
        """Of the blocks of all of them."""
        return self._count.bytes

    def __setitem__(self, number: int, held: Held) -> None:
        self.pop(number, None)
        super().__setitem__(number, held)
        held[0].count_in(self._count)

    def pop(self, number: int, default: None = None) -> Held | None:  # type: ignore[override]
        """What had the number; None where nothing had."""
        held: Held | None = super().pop(number, None)
        if held is not None:
            held[0].count_in(None)
        return held

    def clear(self) -> None:
        for number in list(self):
            self.pop(number)
