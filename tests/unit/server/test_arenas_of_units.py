"""Both kinds of arena, as a client sees them, say the same of pages of several units."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from kvtier_agent.cache.units import PageForm, in_one_piece
from kvtier_agent.server.mapping import DeviceArena, FileArena, Mapped, UnmappedError
from kvtier_agent.server.protocol import ArenaInfo

SLOT, SLOTS, PAGE = 16384, 6, 9001
FORMS = [in_one_piece(PAGE), PageForm(PAGE, 4, 2500), PageForm(PAGE, 2, 9000)]


def file_arena() -> Mapped:
    descriptor = os.memfd_create("arena")
    os.ftruncate(descriptor, SLOT * SLOTS)
    return FileArena(ArenaInfo(1, SLOT * SLOTS), descriptor)


def device_arena(monkeypatch: pytest.MonkeyPatch) -> Mapped:
    """Over host memory: what a device does is in `tests/gpu`."""
    memory = torch.zeros(SLOT * SLOTS, dtype=torch.uint8)

    class View:
        def __getitem__(self, span: slice) -> Any:
            if span.stop > SLOT * SLOTS:
                raise IndexError("no chunk")
            return memory[span]

    monkeypatch.setattr("kvtier_agent.cache.arena.open_device_arena", lambda _: View())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return DeviceArena(ArenaInfo(0, SLOT * SLOTS, "cuda"))


@pytest.fixture(params=["file", "device"])
def arena(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Mapped:
    return file_arena() if request.param == "file" else device_arena(monkeypatch)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_pages_and_their_units_come_back(arena: Mapped, form: PageForm) -> None:
    pages = np.random.default_rng(1).integers(0, 256, (3, PAGE), np.uint8)
    offsets = np.array([4, 0, 2], np.uint64) * np.uint64(SLOT)
    rows = np.array([1, 2, 0], np.uint64)
    sums = arena.write(offsets, form, pages.data.cast("B"), rows)
    assert sums.tolist() == [form.checksum(pages[i]) for i in (1, 2, 0)]
    out = np.zeros((3, PAGE), np.uint8)
    assert np.array_equal(arena.read(offsets, form, out.data.cast("B"), rows), sums)
    assert np.array_equal(out, pages)
    if form.units == 1:
        assert not arena.view(4 * SLOT + 12288, 64).any()  # nothing lies behind it
        return
    units, found = arena.left(offsets, form)
    assert np.array_equal(found, sums)
    out[:] = 0
    for first in range(form.units):
        for last in range(first + 1, form.units + 1):
            places = rows * np.uint64(PAGE) + np.uint64(form.start(first))
            got = arena.read_units(offsets, form, range(first, last), out.data.cast("B"), places)
            assert np.array_equal(got, units[:, first:last])
            span = slice(form.start(first), form.start(last))
            assert np.array_equal(out[:, span], pages[:, span])
    assert np.array_equal(out, pages)
    again = arena.leave(offsets, form, units ^ np.uint64(1))
    assert np.array_equal(arena.left(offsets, form)[1], again)
    assert not (again == sums).any()


@pytest.mark.parametrize("form", FORMS[1:], ids=str)
def test_a_slot_that_reaches_past_the_end_is_not_mapped(arena: Mapped, form: PageForm) -> None:
    offsets = np.array([SLOTS * SLOT - 9216], np.uint64)  # the page fits, what is behind does not
    with pytest.raises(UnmappedError):
        arena.left(offsets, form)
    with pytest.raises(UnmappedError):
        arena.leave(offsets, form, np.zeros((1, form.units), np.uint64))
