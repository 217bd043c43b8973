"""Pages of several transfer units in segment files: their sums lie behind the header."""

from __future__ import annotations

import numpy as np
import pytest
from kvtier_agent.cache import geometry as geometries
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.moves import MoveStatus
from kvtier_agent.cache.units import in_one_piece
from kvtier_agent.storage import recovery
from kvtier_agent.storage.l2 import L2
from kvtier_agent.storage.segment import HEADER, HEADER_BYTES, PageStamp
from kvtier_agent.storage.volume import Volume

OK, BAD = int(MoveStatus.OK), int(MoveStatus.BAD_PAGE)


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a unit were at most so many bytes, so that pages are small."""
    monkeypatch.setattr(geometries, "UNIT_BYTES", 12_000)


class Disk:
    """An L2 over a folder, and an arena: pages in slots 0 to 9, room to read into behind."""

    def __init__(self, folder, geometry: Geometry | None = None, form=None) -> None:
        # Seven layers of 5,120 bytes: units of two, the last of one, and none of them aligned.
        self.geometry = geometry or Geometry(7, 1, 160, 1, 16)
        self.volume = Volume("data0", folder, "d", allow_root_filesystem=True)
        self.l2 = L2([self.volume], self.geometry)
        self.l2.limit(8 << 20, 0, "async")
        if form is not None:  # as a version before units did
            self.l2.form, self.l2.stored_as = form, self.geometry.fingerprint
            self.l2.journals.identity = self.l2.journals.identity.__class__(
                self.geometry.fingerprint, self.l2.per_segment, self.l2.stride
            )
        self.found = recovery.recover(self.l2)
        slot = self.geometry.slot_bytes
        flat = np.zeros(20 * slot + 4096, dtype=np.uint8)
        start = -flat.ctypes.data % 4096
        self.arena = flat[start : start + 20 * slot].reshape(20, slot)
        dice = np.random.default_rng(5)
        self.pages = dice.integers(0, 256, (10, self.geometry.page_bytes), np.uint8)
        self.arena[:10, : self.geometry.page_bytes] = self.pages
        self.keys = dice.integers(0, 256, (10, 16), np.uint8)
        self.rows = np.arange(10, dtype=np.uint32)
        self.sums = self.l2.form.checksums(self.l2.form.of_rows(self.arena, self.rows))

    def write(self, sums=None) -> list[int]:
        stamp = PageStamp(self.keys, self.keys, self.rows * 16, self.sums if sums is None else sums)
        return self.l2.write(self.rows, stamp, self.arena, self.rows)[0].tolist()

    def read(self) -> list[int]:
        self.arena[10:] = 0
        return self.l2.read(self.rows, self.keys, self.sums, self.arena, self.rows + 10)[0].tolist()

    def flip(self, slot: int, offset: int) -> None:
        path = self.volume.folder / "segment-00000000.kv"
        with path.open("r+b") as file:
            file.seek(slot * self.l2.stride + offset)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 0x10]))

    def close(self) -> None:
        self.l2.close()
        self.volume.close()


@pytest.fixture
def disk(mount):
    made = Disk(mount)
    assert made.l2.form.units == 4
    yield made
    made.close()


def test_pages_and_their_unit_sums_come_back(disk) -> None:
    assert disk.write() == [OK] * 10
    assert disk.read() == [OK] * 10
    page, form = disk.geometry.page_bytes, disk.l2.form
    assert np.array_equal(disk.arena[10:, :page], disk.pages)
    assert np.array_equal(
        form.left(disk.arena, disk.rows + 10), form.of_rows(disk.arena, disk.rows)
    )


def test_what_lies_behind_a_page_in_memory_is_not_asked_when_it_is_written(disk) -> None:
    disk.arena[3, disk.l2.form.trailer] ^= 1
    assert disk.write() == [OK] * 10
    assert disk.read() == [OK] * 10


@pytest.mark.parametrize("unit", range(4))
def test_a_unit_that_changed_in_memory_is_never_written(disk, unit: int) -> None:
    disk.arena[7, disk.l2.form.start(unit)] ^= 1
    assert disk.write() == [OK] * 7 + [BAD] + [OK] * 2


@pytest.mark.parametrize("unit", range(4))
def test_a_flipped_bit_in_a_unit_is_found(disk, unit: int) -> None:
    disk.write()
    disk.flip(4, HEADER_BYTES + disk.l2.form.start(unit + 1) - 1)
    assert disk.read() == [OK] * 4 + [BAD] + [OK] * 5
    assert not disk.l2.form.left(disk.arena, disk.rows[4:5] + 10).any()


@pytest.mark.parametrize("unit", range(4))
def test_a_flipped_bit_in_the_sums_behind_a_header_is_found(disk, unit: int) -> None:
    disk.write()
    disk.flip(4, HEADER.itemsize + 8 * unit)
    assert disk.read() == [OK] * 4 + [BAD] + [OK] * 5


def test_damage_behind_the_sums_is_none(disk) -> None:
    disk.write()
    disk.flip(4, HEADER.itemsize + 8 * 4)
    assert disk.read() == [OK] * 10


def test_compaction_takes_the_sums_along(disk) -> None:
    disk.write()
    stamp = PageStamp(disk.keys[:3], disk.keys[:3], disk.rows[:3], disk.sums[:3])
    target = np.arange(20, 23, dtype=np.uint32)
    uses = np.zeros(3, np.uint32), np.full(3, disk.l2.per_segment, np.uint32)
    assert disk.l2.compact(disk.rows[:3], target, stamp, uses)[0].tolist() == [OK] * 3
    read = disk.l2.read(target, disk.keys[:3], disk.sums[:3], disk.arena, disk.rows[:3] + 10)
    assert read[0].tolist() == [OK] * 3
    assert np.array_equal(
        disk.l2.form.left(disk.arena, disk.rows[:3] + 10),
        disk.l2.form.of_rows(disk.arena, disk.rows[:3]),
    )


def test_a_new_process_finds_them(disk, mount) -> None:
    disk.write()
    disk.close()
    after = Disk(mount)
    assert after.found.slots.tolist() == list(range(10))
    assert after.read() == [OK] * 10
    after.close()


def test_files_of_a_version_that_knew_no_units_are_a_cold_start(disk, mount, capsys) -> None:
    disk.close()
    old = Disk(mount, form=in_one_piece(disk.geometry.page_bytes))
    assert old.write() == [OK] * 10
    assert old.read() == [OK] * 10
    old.close()
    assert list(mount.rglob("segment-*"))
    after = Disk(mount)
    assert after.found.slots.size == 0
    assert not list(mount.rglob("segment-*"))
    assert "its journal is about pages of another model or layout" in capsys.readouterr().out
    after.close()


def test_that_version_starts_cold_on_files_of_this_one(disk, mount, capsys) -> None:
    disk.write()
    disk.close()
    old = Disk(mount, form=in_one_piece(disk.geometry.page_bytes))
    assert old.found.slots.size == 0
    assert "another model or layout" in capsys.readouterr().out
    old.close()


def test_a_header_of_the_old_form_is_not_believed(disk) -> None:
    """Where it is met all the same: as bytes they would match."""
    form, name = disk.l2.form, disk.l2.stored_as
    disk.l2.form, disk.l2.stored_as = in_one_piece(form.page_bytes), disk.geometry.fingerprint
    disk.sums = disk.l2.form.checksums(disk.l2.form.of_rows(disk.arena, disk.rows))
    assert disk.write() == [OK] * 10
    disk.l2.form, disk.l2.stored_as = form, name
    assert disk.read() == [BAD] * 10
