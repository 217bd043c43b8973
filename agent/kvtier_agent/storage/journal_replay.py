"""What a journal says: events in, records out. Pure.

Records are events too: for each segment that was ever heard of one RESET with its newest
generation, then a PUT for each page that lies in it, in the order of their slots. So a checkpoint
has the format of a log, and `replay` is the one function behind recovery, checkpoints and tests.

The rule, for each segment on its own:

    its generation      the highest that any event about it names (generations only ever rise, so a
                        RESET that was lost before a PUT of its generation is still known)
    void                every event of a lower generation
    a slot's page       of its other events the last one, if that is a PUT
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.words import take_records
from kvtier_agent.storage.journal_format import NO_EVENTS, EventKind, Events, resets


def replay(records: Events, events: Events, per_segment: int) -> Events:
    """Records after `events` have happened to `records`. O(n log n)."""
    if not len(events):
        return records
    both = np.concatenate([records, events]) if len(records) else events
    # Sorted by place (a RESET before the slots of its segment) and, within one, by time.
    place = both["slot"].astype(np.int64) * 2 + 1
    of_segment = both["kind"] == EventKind.RESET
    place[of_segment] = (place[of_segment] - 1) * per_segment
    order = np.argsort(place, kind="stable")
    place = place[order]
    segment = place // (2 * per_segment)
    starts = _starts(segment)
    generation = both["generation"][order]
    newest = np.maximum.reduceat(generation, starts)
    sizes = np.diff(np.append(starts, len(segment)))
    valid = np.flatnonzero((generation == np.repeat(newest, sizes)) & (place % 2 == 1))
    # Of what a slot has seen in this generation, the last.
    last = np.append(place[valid][1:] != place[valid][:-1], True)[: len(valid)]
    chosen = order[valid[last]]
    live = both["kind"][chosen] == EventKind.PUT
    heads = resets(segment[starts], newest)
    pages = take_records(both, chosen[live])
    before = np.searchsorted(pages["slot"].astype(np.int64), segment[starts] * per_segment)
    return np.insert(pages, before, heads)


def merge(records: Iterable[Events], events: Events, per_segment: int) -> Iterator[Events]:
    """`replay` in pieces, for records that are not to be held in memory as a whole: give them in
    parts as they lie in a checkpoint, get the new ones in parts. All parts together are what
    `replay(all records, events)` gives; one call of it sees all that concerns a segment."""
    segment = segments_of(events, per_segment)
    order = np.argsort(segment, kind="stable")
    events, segment = take_records(events, order), segment[order]
    done = 0
    held = NO_EVENTS
    for part in records:
        held = np.concatenate([held, part]) if len(held) else part
        if not len(held):
            continue
        # The last segment may go on in the next part.
        open_segment = segments_of(held[-1:], per_segment)[0]
        cut = int(np.searchsorted(segments_of(held, per_segment), open_segment))
        if not cut:
            continue
        upto = int(np.searchsorted(segment, open_segment))
        yield replay(held[:cut], events[done:upto], per_segment)
        held, done = held[cut:], upto
    if len(held) or done < len(events):
        yield replay(held, events[done:], per_segment)


def segments_of(events: Events, per_segment: int) -> NDArray[np.int64]:
    """The segment each event is about."""
    slot = events["slot"].astype(np.int64)
    return np.where(events["kind"] == EventKind.RESET, slot, slot // per_segment)


def pages_of(records: Events) -> Events:
    """The PUTs of records: one per page."""
    return take_records(records, np.flatnonzero(records["kind"] == EventKind.PUT))


def generations_of(records: Events) -> dict[int, int]:
    """Segment -> its newest generation."""
    heads = records[records["kind"] == EventKind.RESET]
    return dict(zip(heads["slot"].tolist(), heads["generation"].tolist(), strict=True))


def _starts(sorted_values: NDArray[np.int64]) -> NDArray[np.intp]:
    """Where each run of equal values begins."""
    return np.flatnonzero(np.append(True, sorted_values[1:] != sorted_values[:-1]))
