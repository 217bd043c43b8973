"""What a journal says: against a plain dict, whole and in pieces; bytes torn or damaged."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtier_agent.storage.journal_format import (
    CHECKPOINT_MAGIC,
    EVENT,
    FORMAT_VERSION,
    HEADER_BYTES,
    LOG_MAGIC,
    NO_EVENTS,
    EventKind,
    FileHeader,
    Identity,
    NewerFormatError,
    Scanner,
    _sum,
    end_frame,
    frame,
)
from kvtier_agent.storage.journal_replay import generations_of, merge, pages_of, replay

PER_SEGMENT = 4
SEGMENTS = 5

steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "delete", "reset", "lost reset"]),
        st.integers(0, SEGMENTS * PER_SEGMENT - 1),
    ),
    max_size=60,
)


def happen(sequence):
    """Events of these steps, and what is left: slot -> sequence, segment -> generation."""
    pages, generations, events = {}, {}, []
    for number, (what, slot) in enumerate(sequence):
        segment = slot // PER_SEGMENT
        event = np.zeros(1, dtype=EVENT)
        event["sequence"] = number
        if "reset" in what:
            generations[segment] = generations.get(segment, 0) + 1
            pages = {s: n for s, n in pages.items() if s // PER_SEGMENT != segment}
            event["kind"], event["slot"] = EventKind.RESET, segment
            if what == "lost reset":
                # The next thing that is known of the segment is a page of the new generation.
                pages[slot] = number
                event["kind"], event["slot"] = EventKind.PUT, slot
        elif what == "put":
            pages[slot] = number
            event["kind"], event["slot"] = EventKind.PUT, slot
        else:
            pages.pop(slot, None)
            event["kind"], event["slot"] = EventKind.DEL, slot
        event["generation"] = generations.setdefault(segment, 0)
        events.append(event)
    return np.concatenate(events) if events else NO_EVENTS, pages, generations


def as_dicts(records):
    pages = pages_of(records)
    return (
        dict(zip(pages["slot"].tolist(), pages["sequence"].tolist(), strict=True)),
        generations_of(records),
    )


@given(steps, st.data())
@settings(max_examples=300, deadline=None)
def test_replay_agrees_with_a_dict_however_the_events_are_cut(sequence, data):
    events, pages, generations = happen(sequence)
    cut = data.draw(st.integers(0, len(events)))
    records = replay(NO_EVENTS, events[:cut], PER_SEGMENT)
    whole = replay(records, events[cut:], PER_SEGMENT)
    assert as_dicts(whole) == (pages, generations)
    step = data.draw(st.integers(1, 10))
    parts = [records[i : i + step] for i in range(0, len(records), step)]
    merged = list(merge(parts, events[cut:], PER_SEGMENT))
    assert (np.concatenate([NO_EVENTS, *merged]) == whole).all()
    assert (replay(NO_EVENTS, whole, PER_SEGMENT) == whole).all(), "records are events"


def test_an_event_of_an_earlier_generation_that_comes_late_is_void():
    events, _, _ = happen([("put", 0), ("reset", 0), ("put", 1)])
    late = events[:1]
    records = replay(NO_EVENTS, np.concatenate([events, late]), PER_SEGMENT)
    assert list(as_dicts(records)[0]) == [1]


def test_a_million_pages_keep_their_fields():
    events = np.zeros(1_000_000, dtype=EVENT)
    events["kind"] = EventKind.PUT
    events["slot"] = np.random.default_rng(1).permutation(len(events))
    events["checksum"] = events["slot"].astype(np.uint64) * 3
    pages = pages_of(replay(NO_EVENTS, events, 1000))
    assert (pages["slot"] == np.arange(len(events))).all()
    assert (pages["checksum"] == np.arange(len(events)) * 3).all()


# -- bytes --------------------------------------------------------------------------------------

NONCE = 0x1234_5678_9ABC_DEF0


def a_file(batches):
    """Frames of some events; (bytes behind the header, offsets at which frames end)."""
    data, ends = b"", [HEADER_BYTES]
    for start, count in batches:
        events = np.zeros(count, dtype=EVENT)
        events["kind"] = EventKind.PUT
        events["sequence"] = np.arange(start, start + count)
        data += frame(events, NONCE, HEADER_BYTES + len(data))
        ends.append(HEADER_BYTES + len(data))
    return data, ends


def scan(data, step=1 << 20):
    scanner = Scanner(NONCE)
    parts = [scanner.feed(data[i : i + step]) for i in range(0, len(data), step)]
    return scanner, np.concatenate([NO_EVENTS, *parts])["sequence"].tolist()


DATA, ENDS = a_file([(0, 3), (3, 1), (4, 5)])


@pytest.mark.parametrize("step", [1, 7, 100, 1 << 20])
def test_frames_are_read_however_the_file_comes(step):
    scanner, numbers = scan(DATA, step)
    assert numbers == list(range(9))
    assert scanner.offset == ENDS[-1]
    assert not scanner.ended, "a log may go on"


@given(st.integers(0, len(DATA)), st.integers(1, 300))
@settings(deadline=None)
def test_a_torn_file_ends_at_its_last_whole_frame(cut, step):
    scanner, numbers = scan(DATA[:cut], step)
    assert scanner.offset == max(end for end in ENDS if end - HEADER_BYTES <= cut)
    assert numbers == list(range({ENDS[0]: 0, ENDS[1]: 3, ENDS[2]: 4, ENDS[3]: 9}[scanner.offset]))


@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
@settings(deadline=None)
def test_a_flipped_byte_ends_the_file_before_its_frame(at, flip):
    damaged = bytearray(DATA)
    damaged[at] ^= flip
    scanner, _ = scan(bytes(damaged))
    assert scanner.offset == max(end for end in ENDS if end - HEADER_BYTES <= at)


def test_frames_of_another_file_or_place_are_no_frames():
    assert Scanner(NONCE + 1).feed(DATA).size == 0
    assert Scanner(NONCE, offset=HEADER_BYTES + 16).feed(DATA).size == 0


def test_a_checkpoint_is_complete_only_with_its_last_frame():
    whole = DATA + end_frame(9, NONCE, ENDS[-1])
    assert scan(whole)[0].complete
    assert not scan(DATA)[0].complete
    assert not scan(DATA + end_frame(8, NONCE, ENDS[-1]))[0].complete


IDENTITY = Identity(b"f" * 16, 4, 12288)


def test_a_header_says_what_was_written():
    header = FileHeader(LOG_MAGIC, IDENTITY, 7, NONCE)
    assert len(header.encode()) == HEADER_BYTES
    assert FileHeader.decode(header.encode()) == header


@given(st.integers(0, 71), st.integers(1, 255))
@settings(deadline=None)
def test_a_damaged_header_is_none(at, flip):
    data = bytearray(FileHeader(CHECKPOINT_MAGIC, IDENTITY, 7, NONCE).encode())
    data[at] ^= flip
    assert FileHeader.decode(bytes(data)) is None
    assert FileHeader.decode(bytes(data[:40])) is None


def test_a_newer_version_is_told_from_damage():
    data = bytearray(FileHeader(LOG_MAGIC, IDENTITY, 7, NONCE).encode())
    data[8] = FORMAT_VERSION + 1
    data[64:72] = _sum(bytes(data[:64]), 0).to_bytes(8, "little")
    with pytest.raises(NewerFormatError) as caught:
        FileHeader.decode(bytes(data))
    assert caught.value.version == FORMAT_VERSION + 1
