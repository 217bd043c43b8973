"""Segments that are written anew: what was in them is void, on the drive and in the journal."""

import errno
import json

import numpy as np
import pytest
from kvtier_agent.cache.moves import MoveStatus
from kvtier_agent.native import copier
from kvtier_agent.storage import recovery
from kvtier_agent.storage.journal import Journal
from kvtier_agent.storage.segment import HEADER_BYTES, LAYOUT_VERSION, HeaderBlock, PageStamp

OK = MoveStatus.OK
SIZE = 8


def u32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint32)


def write(one, slots, rows, epoch, size=SIZE):
    slots, rows = u32(*slots), u32(*rows)
    stamp = PageStamp(one.keys[rows], one.keys[rows], rows * 16, one.sums[rows])
    uses = np.full_like(slots, epoch), np.full_like(slots, size)
    return one.l2.write(slots, stamp, one.arena, rows, uses)[0].tolist()


def compact(one, source, target, rows, epoch=0, size=SIZE):
    source, target, rows = u32(*source), u32(*target), u32(*rows)
    stamp = PageStamp(one.keys[rows], one.keys[rows], rows * 16, one.sums[rows])
    uses = np.full_like(source, epoch), np.full_like(source, size)
    return one.l2.compact(source, target, stamp, uses)


def header(one, slot: int):
    block = HeaderBlock(1)
    with (one.folder / "segment-00000000.kv").open("rb") as file:
        file.seek(slot * one.l2.stride)
        block.bytes[0] = np.frombuffer(file.read(HEADER_BYTES), dtype=np.uint8)
    return block.fields[0]


def test_a_later_use_voids_what_was_there_and_keeps_the_blocks(make_l2):
    one = make_l2()
    recovery.recover(one.l2)
    assert write(one, [0, 1, 2], [0, 1, 2], epoch=0) == [OK] * 3
    held = one.l2.segment_bytes
    assert write(one, [0], [7], epoch=1) == [OK]
    assert one.l2.segment_bytes == held
    assert (header(one, 0)["generation"], header(one, 1)["generation"]) == (2, 1)
    assert recovery.recover(make_l2().l2).slots.tolist() == [0]


def test_the_journal_is_told_before_the_first_byte_of_a_later_use(make_l2, monkeypatch):
    one = make_l2()
    recovery.recover(one.l2)
    write(one, [0, 1], [0, 1], epoch=0)
    told = []

    def told_of(name):
        real = getattr(Journal, name)

        def tell(*args, **options):
            told.append((name, int(header(one, 0)["generation"])))
            return real(*args, **options)

        return tell

    for name in ("reset", "put", "delete"):
        monkeypatch.setattr(Journal, name, told_of(name))
    write(one, [0], [7], epoch=1)
    write(one, [1], [8], epoch=1)
    assert told == [("reset", 1), ("put", 2), ("put", 2)]


def test_a_use_that_cannot_be_told_does_not_begin(make_l2):
    one = make_l2()
    recovery.recover(one.l2)
    write(one, [0, 1], [0, 1], epoch=0)
    one.io.journal_writes = [errno.ENOSPC]
    assert write(one, [0], [7], epoch=1) == [MoveStatus.NO_SPACE]
    assert (one.read([0, 1])[0] == OK).all(), "nothing was written"
    assert write(one, [0], [7], epoch=1) == [OK]


def test_a_write_of_an_earlier_use_comes_too_late(make_l2):
    one = make_l2()
    write(one, [0], [0], epoch=3)
    assert write(one, [1], [1], epoch=2) == [MoveStatus.CANCELLED]
    scrubbed = one.l2.scrub(u32(0), (u32(2), u32(SIZE)))
    assert scrubbed.tolist() == [MoveStatus.CANCELLED]
    assert (one.read([0])[0] == OK).all()


def test_what_is_given_up_in_an_earlier_use_says_nothing_of_the_page_there_now(make_l2):
    one = make_l2()
    recovery.recover(one.l2)
    write(one, [0, 1], [0, 1], epoch=0)
    write(one, [0, 1], [5, 6], epoch=1)
    one.l2.forget(u32(0, 1), u32(0, 1))
    assert recovery.recover(make_l2().l2).slots.tolist() == [0]


def test_a_shorter_use_gives_the_blocks_behind_it_back(make_l2):
    one = make_l2()
    write(one, [0], [0], epoch=0, size=10)
    write(one, [0], [0], epoch=1, size=4)
    (held,) = one.l2.segments.values()
    assert held[0].laid.sum() == 4
    assert one.l2.segment_bytes <= 4 * one.l2.stride + 4096


def test_a_test_of_a_segment_voids_what_it_held(make_l2):
    one = make_l2()
    recovery.recover(one.l2)
    write(one, [0, 1], [0, 1], epoch=0)
    assert one.l2.scrub(u32(0), (u32(1), u32(SIZE))).tolist() == [OK]
    assert recovery.recover(make_l2().l2).slots.size == 0


def test_pages_are_compacted_byte_for_byte(make_l2):
    one = make_l2()
    rows = list(range(9))
    write(one, rows, rows, epoch=0, size=20)
    target = [10, 11, 12, 13, 14, 15, 16, 17, 18]
    status, error = compact(one, rows, target, rows, size=20)
    assert error == ""
    assert (status == OK).all()
    status, _, found = one.read(target, rows=rows)
    assert (status == OK).all()
    assert (found == one.arena[rows]).all()


@pytest.mark.parametrize(
    ("reads", "writes", "expected"),
    [
        ([errno.EIO], [], MoveStatus.IO_ERROR),
        ([], [errno.EIO], MoveStatus.TARGET_ERROR),
        ([], [0], MoveStatus.TARGET_ERROR),
        ([], [errno.ENOSPC], MoveStatus.NO_SPACE),
        ([], [errno.EROFS], MoveStatus.READ_ONLY),
    ],
)
def test_a_compaction_says_which_side_failed(make_l2, reads, writes, expected):
    one = make_l2()
    write(one, [0, 1], [0, 1], epoch=0)
    one.io.reads, one.io.writes = reads, writes
    status, error = compact(one, [0, 1], [4, 5], [0, 1])
    assert status.tolist() == [expected] * 2
    assert error
    assert (one.read([0, 1])[0] == OK).all()


def test_a_bad_page_is_not_compacted(make_l2):
    one = make_l2()
    write(one, [0, 1], [0, 1], epoch=0)
    with (one.folder / "segment-00000000.kv").open("r+b") as file:
        file.seek(HEADER_BYTES + 17)
        file.write(b"\xff\x00\xff")
    status, _ = compact(one, [0, 1], [4, 5], [0, 1])
    assert status.tolist() == [MoveStatus.BAD_PAGE, OK]


LAYOUT_1 = np.dtype(
    [
        ("magic", "S8"), ("version", "<u4"), ("algorithm", "<u4"), ("key", "u1", 16),
        ("parent", "u1", 16), ("fingerprint", "u1", 16), ("length", "<u4"), ("depth", "<u4"),
        ("checksum", "<u8"), ("sequence", "<u8"), ("header_checksum", "<u8"),
    ]
)  # fmt: skip


def test_a_folder_of_layout_1_is_a_cold_start_and_is_never_misread(make_l2, capsys):
    """As version 1 wrote it: slots used in place, a header each, no journal."""
    one = make_l2()
    recovery.recover(one.l2)
    one.l2.close()
    manifest = one.folder / recovery.MANIFEST_NAME
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "layout": 1}))
    for path in one.folder.glob("journal-*"):
        path.unlink()
    page = np.zeros(one.l2.stride, dtype=np.uint8)
    fields = page[: LAYOUT_1.itemsize].view(LAYOUT_1)[0]
    fields["magic"], fields["version"], fields["algorithm"] = b"KVTIERSG", 1, 1
    fields["key"], fields["parent"] = one.keys[3], one.keys[2]
    fields["fingerprint"] = np.frombuffer(one.l2.geometry.fingerprint, dtype=np.uint8)
    fields["length"], fields["checksum"], fields["sequence"] = 8192, one.sums[3], 1
    fields["header_checksum"] = copier.checksum(page[: LAYOUT_1.itemsize - 8])
    page[HEADER_BYTES:] = one.arena[3]
    segment = one.folder / "segment-00000000.kv"
    segment.write_bytes(page.tobytes())
    block = HeaderBlock(1)
    block.bytes[0] = page[:HEADER_BYTES]
    assert not block.valid(1, one.l2.stored_as, one.l2.form).any()
    after = make_l2()
    assert recovery.recover(after.l2).slots.size == 0
    assert not segment.exists()
    assert f"layout 1, this agent writes {LAYOUT_VERSION}" in capsys.readouterr().out
