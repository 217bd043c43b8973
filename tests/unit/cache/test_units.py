"""How a page is cut into transfer units, and that every way of summing it says the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash
from kvtier_agent import native
from kvtier_agent.cache import units
from kvtier_agent.cache.geometry import MAX_UNITS, UNIT_BYTES, Geometry
from kvtier_agent.cache.units import PageForm, form_of, in_one_piece
from kvtier_agent.storage.segment import HEADER, HEADER_BYTES

VECTOR = "1fac8ee0fa3b6c75"
COPIERS = ["python"] + (["native"] if native.NATIVE is not None else [])
FORMS = [
    PageForm(5000, 1, 5000), PageForm(5000, 5, 1000), PageForm(5000, 4, 1500),
    PageForm(9001, 2, 9000),
]  # fmt: skip


@pytest.fixture(params=COPIERS, autouse=True)
def copier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(units, "copier", native.PythonCopier())


def cut(page: np.ndarray, form: PageForm) -> list[np.ndarray]:
    return [page[form.start(u) : form.start(u + 1)] for u in range(form.units)]


def plain(page: np.ndarray, form: PageForm) -> tuple[list[int], int]:
    """Unit sums and checksum, as the words say."""
    sums = [xxhash.xxh3_64_intdigest(part.tobytes()) for part in cut(page, form)]
    if form.units == 1:
        return sums, sums[0]
    raw = b"".join(one.to_bytes(8, "little") for one in sums)
    return sums, xxhash.xxh3_64_intdigest(raw)


def geometry(layers: int, layer_bytes: int, **more: Any) -> Geometry:
    return Geometry(layers, 1, layer_bytes // 32, 1, 16, **more)


@pytest.mark.parametrize(
    ("layers", "layer_bytes", "group", "count"),
    [
        (1, 64 << 20, 1, 1),  # one layer is one unit, however large
        (4, 1 << 18, 4, 1),  # a page of 1 MiB
        (5, 1 << 18, 4, 2),
        (80, 1 << 18, 4, 20),
        (80, 320 << 10, 3, 27),  # the last one has two layers
        (32, 2 << 20, 1, 32),  # no group of two layers is small enough
        (1000, 1 << 20, 3, 334),  # 1,000 sums would not fit: larger groups
        (30_000, 32_000, 63, 477),
    ],
)
def test_units_are_the_largest_groups_of_layers_that_fit(
    layers: int, layer_bytes: int, group: int, count: int
) -> None:
    one = geometry(layers, layer_bytes)
    assert (one.unit_layers, one.units) == (group, count)
    form = form_of(one)
    assert form.start(0) == 0
    assert form.start(count) == one.page_bytes
    last = one.page_bytes - form.start(count - 1)
    assert 0 < last <= one.unit_bytes
    assert last % layer_bytes == 0
    assert one.slot_bytes == -(-one.page_bytes // 4096) * 4096 + (4096 if count > 1 else 0)
    assert one.nvme_slot_bytes == 4096 + -(-one.page_bytes // 4096) * 4096


def test_sums_fit_their_block_and_the_headers() -> None:
    assert HEADER.itemsize + 8 * MAX_UNITS <= HEADER_BYTES
    for layers in (481, 959, 5000, 1 << 15):
        one = geometry(layers, 32 * ((1 << 30) // layers // 32))
        assert 1 < one.units <= MAX_UNITS, layers


def test_a_layer_that_is_no_whole_number_of_bytes_is_not_cut() -> None:
    large = Geometry(layers=8, kv_heads=3, head_size=500_001, dtype_bytes=1, page_tokens=1, tp=16)
    assert large.page_bytes > UNIT_BYTES
    assert large.page_bytes % 8
    assert large.units == 1


def test_a_page_of_one_unit_is_named_and_summed_as_ever() -> None:
    one = geometry(4, 1 << 18)
    assert one.stored_as == one.fingerprint
    page = np.random.default_rng(1).integers(0, 256, one.page_bytes, np.uint8)
    assert form_of(one).checksum(page) == xxhash.xxh3_64_intdigest(page.tobytes())
    assert form_of(one).extent == one.page_bytes
    two = geometry(5, 1 << 18)
    assert two.stored_as != two.fingerprint


def test_the_checksum_of_a_cut_page_is_what_the_words_say() -> None:
    """For ever: pages on volumes are believed by it."""
    page = (np.arange(5000) % 251).astype(np.uint8)
    assert f"{PageForm(5000, 4, 1500).checksum(page):016x}" == VECTOR
    assert plain(page, PageForm(5000, 4, 1500))[1] == int(VECTOR, 16)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_sums_are_those_of_a_plain_reference(form: PageForm) -> None:
    width = form.trailer + 4096
    arena = np.random.default_rng(2).integers(0, 256, (6, width), np.uint8)
    rows = np.array([4, 0, 3], np.uint32)
    sums = form.of_rows(arena, rows)
    sums_of = [plain(arena[row, : form.page_bytes], form) for row in rows]
    assert sums.tolist() == [one[0] for one in sums_of]
    assert form.checksums(sums).tolist() == [one[1] for one in sums_of]
    assert form.of_rows(arena, rows[:0]).shape == (0, form.units)
    assert form.checksums(form.of_rows(arena, rows[:0])).shape == (0,)
    before = arena.copy()
    form.leave(arena, rows, sums)
    assert np.array_equal(arena[:, : form.page_bytes], before[:, : form.page_bytes])
    if form.units > 1:
        assert np.array_equal(form.left(arena, rows), sums)
        assert np.array_equal(arena[[1, 2, 5]], before[[1, 2, 5]])
    else:
        assert np.array_equal(arena, before)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_units_are_copied_to_where_they_belong(form: PageForm) -> None:
    source = np.random.default_rng(3).integers(0, 256, 3 * 16384, np.uint8)
    starts = np.array([16384, 0, 32768], np.uint64)
    for first in range(form.units):
        for last in range(first, form.units + 1):
            width = form.start(last) - form.start(first)
            target = np.zeros((4, width + 3), np.uint8)
            places = np.array([0, 3, 1], np.uint64) * np.uint64(width + 3)
            sums = form.copy(
                source, starts, target, places, private="target", first=first, last=last
            )
            assert sums.shape == (3, last - first)
            for i, row in enumerate((0, 3, 1)):
                page = source[int(starts[i]) :][: form.page_bytes]
                assert np.array_equal(
                    target[row, :width], page[form.start(first) : form.start(last)]
                )
                assert sums[i].tolist() == plain(page, form)[0][first:last]
            assert not target[2].any()
            assert not target[:, width:].any()


def test_a_page_in_one_piece_has_one_unit_whatever_its_size() -> None:
    form = in_one_piece(5 << 20)
    assert (form.units, form.extent, form.start(1)) == (1, 5 << 20, 5 << 20)
