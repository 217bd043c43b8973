"""What a restart finds, and what it must not keep."""

import dataclasses
import errno
import json

import numpy as np
import pytest
import xxhash
from descriptors import open_files
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.moves import MoveStatus
from kvtier_agent.storage import recovery
from kvtier_agent.storage.checkpoint import write_checkpoint
from kvtier_agent.storage.volume import VolumeError


def found_slots(one) -> list[int]:
    return recovery.recover(one.l2).slots.tolist()


def test_pages_of_an_earlier_process_are_found_oldest_first(make_l2):
    before = make_l2()
    recovery.recover(before.l2)
    before.write([5])
    before.write([1, 2])
    after = make_l2()
    found = recovery.recover(after.l2)
    assert found.slots.tolist() == [5, 1, 2]
    assert (found.keys == after.keys[[5, 1, 2]]).all()
    assert (found.checksums == after.sums[[5, 1, 2]]).all()
    assert found.depths.tolist() == [80, 16, 32]
    recovery.keep_only(after.l2, found.slots)
    status, _, rows = after.read([5, 1, 2])
    assert (status == MoveStatus.OK).all()
    assert (rows == after.arena[[5, 1, 2]]).all()


def test_what_is_not_kept_gives_its_blocks_back_before_the_first_write(make_l2):
    before = make_l2()
    recovery.recover(before.l2)
    before.write(range(10))
    after = make_l2(slots=3)
    found = recovery.recover(after.l2)
    recovery.keep_only(after.l2, found.slots[:2])
    assert after.l2.allocated_bytes <= after.l2.cap_bytes
    assert (after.read([0, 1])[0] == MoveStatus.OK).all()
    assert (after.write([7])[0] == MoveStatus.OK).all()
    assert after.l2.allocated_bytes <= after.l2.cap_bytes


def test_the_newer_of_two_copies_wins(make_l2):
    before = make_l2()
    recovery.recover(before.l2)
    before.write([3], rows=[9])
    before.write([8], rows=[9])
    after = make_l2()
    assert found_slots(after) == [8]


def test_sequence_numbers_go_on_after_a_restart(make_l2):
    one = make_l2()
    recovery.recover(one.l2)
    one.write([3])
    one = make_l2()
    recovery.keep_only(one.l2, recovery.recover(one.l2).slots)
    one.write([1])
    assert found_slots(make_l2()) == [3, 1]


def test_no_segment_is_read(make_l2):
    one = make_l2()
    recovery.recover(one.l2)
    one.write([0, 1, 2])

    class Reads(type(one.io)):
        def read(self, fd, buffers, offset):
            done = super().read(fd, buffers, offset)
            assert fd in self.others, "only the journal is read"
            return done

    assert found_slots(make_l2(io=Reads())) == [0, 1, 2]


def test_a_page_that_is_damaged_is_found_and_never_served(make_l2):
    one = make_l2()
    recovery.recover(one.l2)
    one.write([0, 1, 2])
    path = next(one.folder.glob("segment-*"))
    with path.open("r+b") as file:
        file.seek(one.l2.stride + 30)
        file.write(b"\xff\xff")
    again = make_l2()
    assert found_slots(again) == [0, 1, 2]
    assert again.read([0, 1, 2])[0].tolist() == [MoveStatus.OK, MoveStatus.BAD_PAGE, MoveStatus.OK]


def test_records_without_bytes_are_dropped_for_good(make_l2):
    one = make_l2()
    recovery.recover(one.l2)
    one.write(range(6))
    one.l2.close()
    path = next(one.folder.glob("segment-*"))
    with path.open("r+b") as file:
        file.truncate(4 * one.l2.stride - 1)
    again = make_l2()
    assert found_slots(again) == [0, 1, 2]
    recovery.keep_only(again.l2, np.array([0, 1], np.uint32))
    again.l2.close()
    with path.open("r+b") as file:
        file.truncate(6 * one.l2.stride)
    assert found_slots(make_l2()) == [0, 1], "what was dropped does not come back"
    path.unlink()
    assert found_slots(make_l2()) == []


def test_a_page_that_was_given_up_stays_given_up(make_l2):
    one = make_l2()
    recovery.recover(one.l2)
    one.write(range(6))
    one.l2.forget(np.array([1, 2], np.uint32), np.zeros(2, np.uint32))
    assert found_slots(make_l2()) == [0, 3, 4, 5]


def test_segments_without_a_record_are_removed(make_l2):
    one = make_l2()
    recovery.recover(one.l2)
    one.write([0])
    stray = one.folder / "segment-00000007.kv"
    stray.write_bytes(next(one.folder.glob("segment-00000000.kv")).read_bytes())
    assert found_slots(make_l2()) == [0]
    assert not stray.exists()


def test_a_segment_that_is_made_again_has_a_new_generation(make_l2):
    one = make_l2()
    recovery.recover(one.l2)
    one.write([0, 1])
    one.l2.give_back(np.array([0], np.uint32))
    assert not one.l2.segments
    one.write([3])
    assert one.l2.journals.generations == {0: 2}
    again = make_l2()
    assert found_slots(again) == [3]
    assert again.l2.journals.generations == {0: 2}


def test_an_event_that_cannot_be_recorded_is_a_page_that_is_not_stored(make_l2):
    one = make_l2()
    recovery.recover(one.l2)
    one.write([0])
    one.io.journal_writes = [errno.ENOSPC]
    assert one.write([1])[0].tolist() == [MoveStatus.NO_SPACE]
    one.io.journal_writes = [0]  # a short write
    assert one.write([2])[0].tolist() == [MoveStatus.IO_ERROR]
    assert one.write([3])[0].tolist() == [MoveStatus.OK]
    assert found_slots(make_l2()) == [0, 3]


def test_nothing_is_written_into_a_segment_whose_beginning_is_not_recorded(make_l2):
    one = make_l2()
    recovery.recover(one.l2)
    one.io.journal_writes = [errno.EIO]
    assert one.write([0])[0].tolist() == [MoveStatus.IO_ERROR]
    assert not list(one.folder.glob("segment-*"))
    assert one.write([0])[0].tolist() == [MoveStatus.OK]


def test_what_lies_in_the_folder_is_within_the_cap_right_after_a_restart(make_l2):
    one = make_l2(slots=40)
    recovery.recover(one.l2)
    for slot in range(30):
        one.write([slot])
    again = make_l2(slots=10)
    recovery.keep_only(again.l2, recovery.recover(again.l2).slots[:8])
    held = sum(p.stat().st_blocks * 512 for p in one.folder.glob("*-*"))
    assert held == again.l2.allocated_bytes <= again.l2.cap_bytes


def test_files_of_layout_1_are_a_cold_start(make_l2, capsys):
    """Layout 1 had no journal: a header before each page, and version 1 in all of them."""
    one = make_l2()
    stale = one.folder / "segment-00000000.kv"
    header = b"KVTIERSG" + (1).to_bytes(4, "little")
    stale.write_bytes((header.ljust(4096, b"\0") + bytes(one.l2.slot_bytes)) * 3)
    geometry = dataclasses.asdict(one.l2.geometry)
    text = json.dumps({"layout": 1, "geometry": geometry}, indent=1)
    (one.folder / "layout.json").write_text(text)
    assert found_slots(one) == []
    assert not stale.exists()
    assert json.loads((one.folder / "layout.json").read_text())["layout"] == 2
    assert "it has layout 1, this agent writes 2" in capsys.readouterr().out


def test_a_newer_journal_is_refused_and_left_alone(make_l2):
    one = make_l2()
    recovery.recover(one.l2)
    one.write([0, 1])
    one.l2.close()
    path = next(one.folder.glob("journal-*"))
    data = bytearray(path.read_bytes())
    data[8] = 9
    data[64:72] = xxhash.xxh3_64_intdigest(bytes(data[:64])).to_bytes(8, "little")
    path.write_bytes(data)
    before = {p.name: p.read_bytes() for p in one.folder.iterdir()}
    again = make_l2()
    with pytest.raises(VolumeError, match="has journal format 9, this agent knows 1; use the"):
        recovery.recover(again.l2)
    assert {p.name: p.read_bytes() for p in one.folder.iterdir()} == before


def test_a_volume_that_takes_no_file_leaves_nothing_open(make_l2):
    one = make_l2()
    recovery.recover(one.l2)
    one.write([0, 1])
    again = make_l2()
    before = open_files(again.volume.folder)
    manifest = again.volume.folder / "layout.json"
    manifest.write_text(manifest.read_text() + " ")  # not as this version writes it
    again.io.journal_writes = [errno.ENOSPC]  # the manifest
    with pytest.raises(VolumeError, match="cannot write to") as caught:
        recovery.recover(again.l2)
    assert caught.value.reason == "VolumeFull"
    assert open_files(again.volume.folder) == before
    again.io.journal_writes = [None, errno.EROFS]  # the first log
    with pytest.raises(VolumeError):
        recovery.recover(again.l2)
    assert open_files(again.volume.folder) == before
    assert found_slots(again) == [0, 1]


def test_a_page_given_up_late_does_not_take_its_successor_along(make_l2):
    one = make_l2()
    recovery.recover(one.l2)
    one.write([0, 1])
    one.l2.journals.begin(one.volume, 0)
    one.write([0, 1])
    slots = np.array([0, 1], np.uint32)
    one.l2.journals.gone(one.volume, slots, np.array([1, 2], np.uint32))
    assert found_slots(make_l2()) == [0]


def test_a_checkpoint_takes_the_place_of_the_logs(make_l2):
    one = make_l2()
    recovery.recover(one.l2)
    one.write([5])
    (journal,) = one.l2.journals.all()
    write_checkpoint(journal)
    one.write([1])
    assert sorted(p.name for p in one.folder.glob("*-*")) == [
        "checkpoint-00000002.kv", "journal-00000002.log", "segment-00000000.kv",
    ]  # fmt: skip
    assert found_slots(make_l2()) == [5, 1]


def test_a_journal_may_begin_and_end_while_the_tier_is_in_use(make_l2):
    one = make_l2(durability="none")
    recovery.recover(one.l2)
    one.write([0])
    assert not list(one.folder.glob("journal-*"))
    one.limit(20)
    one.write([1])
    assert list(one.folder.glob("journal-*"))
    one.limit(20, durability="none")
    one.write([2])
    assert not list(one.folder.glob("journal-*"))
    one.limit(20, durability="sync")
    one.write([3])
    assert found_slots(make_l2()) == [3]


def test_durability_none_sweeps(make_l2):
    one = make_l2(durability="none")
    recovery.recover(one.l2)
    one.write([0, 1])
    one.l2.close()
    assert not list(one.folder.glob("segment-*"))
    one = make_l2()
    recovery.recover(one.l2)
    one.write([0, 1])
    assert found_slots(make_l2(durability="none")) == []


def test_orphans_are_removed(make_l2):
    one = make_l2()
    recovery.recover(one.l2)
    one.write([0])
    (one.folder / "segment-0000x.kv").write_text("?")
    (one.folder / "core.1234").write_text("?")
    (one.folder / "segment-00000009.kv").symlink_to("/etc/passwd")
    again = make_l2()
    assert found_slots(again) == [0]
    names = sorted(path.name for path in one.folder.iterdir())
    assert names == [
        "journal-00000001.log", "journal-00000002.log", "layout.json", "lock",
        "segment-00000000.kv",
    ]  # fmt: skip


def test_pages_of_another_geometry_are_swept(make_l2):
    one = make_l2()
    recovery.recover(one.l2)
    one.write([0, 1])
    other = make_l2(geometry=Geometry.of_page_bytes(8192, 16, weights="another model"))
    assert found_slots(other) == []
    assert not list(one.folder.glob("segment-*"))


def test_a_newer_layout_is_refused_and_left_alone(make_l2):
    one = make_l2()
    recovery.recover(one.l2)
    one.write([0, 1])
    manifest = one.folder / "layout.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "layout": 99}))
    again = make_l2()
    with pytest.raises(VolumeError, match="has layout 99, this agent knows 2; use the newer agent"):
        recovery.recover(again.l2)
    assert list(one.folder.glob("segment-*"))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"layout": "x"}', '{"layout": 2}'])
def test_an_unreadable_manifest_means_unknown_pages(make_l2, text):
    one = make_l2()
    recovery.recover(one.l2)
    one.write([0])
    (one.folder / "layout.json").write_text(text)
    assert found_slots(make_l2()) == []


def test_the_geometry_of_the_pages_is_known_before_any_client(make_l2):
    one = make_l2()
    assert recovery.geometry_of(one.volume) is None
    recovery.recover(one.l2)
    assert recovery.geometry_of(one.volume) == one.l2.geometry
    assert np.array_equal(found_slots(make_l2()), [])


@pytest.mark.parametrize(
    "text", ["", "{", "[" * 100_000, "[]", '{"layout": 2, "geometry": {"x": 1}}']
)
def test_a_manifest_that_makes_no_sense_means_a_cold_start(make_l2, text):
    one = make_l2()
    recovery.recover(one.l2)
    one.write([3])
    (one.l2.volumes[0].folder / recovery.MANIFEST_NAME).write_text(text)
    assert recovery.geometry_of(one.l2.volumes[0]) is None
    assert found_slots(make_l2()) == []
