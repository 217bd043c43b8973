"""What a restart finds, and what it must not keep."""

import json

import numpy as np
import pytest
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.moves import MoveStatus
from kvtier_agent.storage import recovery
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
    assert found_slots(after) == [3, 8]  # oldest first: the cache keeps the last


def test_sequence_numbers_go_on_after_a_restart(make_l2):
    one = make_l2()
    recovery.recover(one.l2)
    one.write([3])
    one = make_l2()
    recovery.keep_only(one.l2, recovery.recover(one.l2).slots)
    one.write([1])
    assert found_slots(make_l2()) == [3, 1]


def test_a_torn_or_damaged_header_is_not_found(make_l2):
    one = make_l2()
    recovery.recover(one.l2)
    one.write([0, 1, 2])
    path = next(one.folder.glob("segment-*"))
    with path.open("r+b") as file:
        file.seek(one.l2.stride + 30)
        file.write(b"\xff\xff")
    assert found_slots(make_l2()) == [0, 2]


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
    assert names == ["layout.json", "lock", "segment-00000000.kv"]


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
    with pytest.raises(VolumeError, match="has layout 99, this agent knows 1; use the newer agent"):
        recovery.recover(again.l2)
    assert list(one.folder.glob("segment-*"))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"layout": "x"}', '{"layout": 1}'])
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
    "text", ["", "{", "[" * 100_000, "[]", '{"layout": 1, "geometry": {"x": 1}}']
)
def test_a_manifest_that_makes_no_sense_means_a_cold_start(make_l2, text):
    one = make_l2()
    recovery.recover(one.l2)
    one.write([3])
    (one.l2.volumes[0].folder / recovery.MANIFEST_NAME).write_text(text)
    assert recovery.geometry_of(one.l2.volumes[0]) is None
    assert found_slots(make_l2()) == []
