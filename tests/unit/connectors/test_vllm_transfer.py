"""Copies in groups: what is waited for, what is given up, what is given back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the connector needs torch")

import torch
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.connectors.vllm.layout import BlockCopier, EngineLayout
from kvtier_agent.connectors.vllm.plan import LoadPages, SavePages, request_number
from kvtier_agent.connectors.vllm.settings import MIB, ConnectorSettings
from kvtier_agent.connectors.vllm.transfer import PageTransfer
from kvtier_agent.server.mapping import UnmappedError

PAGES = 7
PER_PAGE = 2
BLOCK_BYTES = 128 << 10
LAYERS = ("a", "b")
LAYOUT = EngineLayout(Geometry(2, 4, 1024, 2, 16), LAYERS, 8, BLOCK_BYTES, PER_PAGE)
PAGE_BYTES = LAYOUT.geometry.page_bytes
KEYS = tuple(bytes([i]) * 16 for i in range(PAGES))
BLOCKS = tuple(range(1, 1 + PAGES * PER_PAGE))
SETTINGS = ConnectorSettings(
    group_mebibytes=2 * PAGE_BYTES // MIB,
    load_timeout_milliseconds=400,
    step_timeout_milliseconds=1000,
)


def page_of(key: bytes) -> np.ndarray:
    return np.tile(np.frombuffer(key, np.uint8), PAGE_BYTES // 16)


class Lease:
    def __init__(self, tiers: Tiers, keys: np.ndarray) -> None:
        self.tiers, self.keys = tiers, keys

    def __enter__(self) -> Lease:
        self.tiers.open += 1
        assert self.tiers.open == 1, "a lease is given back before the next one"
        return self

    def __exit__(self, *error: object) -> None:
        self.tiers.open -= 1

    def copy_to(self, rows: Any) -> np.ndarray:
        self.tiers.buffers.add(rows.data_ptr())
        good = np.array([key.tobytes() in self.tiers.there for key in self.keys])
        for row, key, right in zip(rows.numpy(), self.keys, good, strict=True):
            row[:] = page_of(key.tobytes()) if right else 0xEE
        return good


class Reservation:
    def __init__(self, wanted: Sequence[int], fault: Exception | None) -> None:
        self.offered = np.array(wanted, np.intp)
        self.fault = fault
        self.written: dict[int, bytes] = {}
        self.end: list[str] = []

    def write(self, index: int, row: np.ndarray) -> None:
        if self.fault is not None and self.written:
            raise self.fault
        self.written[index] = row.tobytes()

    def commit(self) -> None:
        self.end.append("commit")

    def abort(self) -> None:
        self.end.append("abort")

    def outgrown(self) -> None:
        self.end.append("outgrown")


class Tiers:
    """An agent that holds the pages `there`; each load takes `seconds` of the clock."""

    def __init__(self, there: Sequence[bytes] = KEYS, seconds: float = 0.0) -> None:
        self.there, self.seconds, self.now = set(there), seconds, 0.0
        self.loads: list[tuple[int, int, int]] = []
        self.buffers: set[int] = set()
        self.open = 0
        self.wanted: Sequence[int] = range(PAGES)
        self.fault: Exception | None = None

    def load(self, keys: Any, *, deadline_milliseconds: int, request: int) -> Lease:
        self.now += self.seconds
        self.loads.append((len(keys), deadline_milliseconds, request))
        return Lease(self, keys)

    def reserve(self, keys: Any, **named: Any) -> Reservation:
        self.reserved = named
        self.reservation = Reservation(self.wanted, self.fault)
        return self.reservation


@pytest.fixture
def caches() -> dict[str, Any]:
    blocks = len(BLOCKS) + 1
    return {name: torch.full((blocks, BLOCK_BYTES), 0xAA, dtype=torch.uint8) for name in LAYERS}


def transfer(tiers: Tiers, caches: dict[str, Any]) -> PageTransfer:
    copier = BlockCopier(LAYOUT, caches, len(BLOCKS) + 1)
    return PageTransfer(tiers, copier, LAYOUT, SETTINGS, clock=lambda: tiers.now)


def load(skip: int = 0) -> LoadPages:
    return LoadPages("r", KEYS, 0, BLOCKS, skip)


def values(caches: dict[str, Any]) -> list[int]:
    """First byte of each block, of block 0 too; every layer and byte has to say the same."""
    both = torch.stack([caches[name] for name in LAYERS])
    assert (both == both[:1, :, :1]).all()
    return both[0, :, 0].tolist()


def test_a_prefix_of_any_length_comes_through_one_small_buffer(caches) -> None:
    tiers = Tiers()
    assert transfer(tiers, caches).load(load(), until=100) == ()
    assert values(caches) == [0xAA, *(i for i in range(PAGES) for _ in range(PER_PAGE))]
    assert [n for n, _, _ in tiers.loads] == [2, 2, 2, 1]
    assert {request for _, _, request in tiers.loads} == {request_number("r")}
    assert len(tiers.buffers) == 1


def test_blocks_in_use_are_not_written(caches) -> None:
    transfer(Tiers(), caches).load(load(skip=1), until=100)
    assert values(caches)[:4] == [0xAA, 0xAA, 0, 1]


def test_the_first_short_group_is_the_last(caches) -> None:
    tiers = Tiers([key for key in KEYS if key != KEYS[3]])
    assert transfer(tiers, caches).load(load(), until=100) == BLOCKS[3 * PER_PAGE :]
    assert values(caches) == [0xAA, 0, 0, 1, 1, 2, 2, *[0] * (4 * PER_PAGE)]
    assert len(tiers.loads) == 2


def test_a_first_page_that_is_gone_leaves_blocks_in_use_alone(caches) -> None:
    assert transfer(Tiers([]), caches).load(load(skip=1), until=100) == BLOCKS[1:]
    assert values(caches)[:3] == [0xAA, 0xAA, 0]


def test_each_group_has_the_wait_of_its_own_and_all_of_them_one_end(caches) -> None:
    tiers = Tiers(seconds=0.35)
    bad = transfer(tiers, caches).load(load(), until=1.0)
    assert [wait for _, wait, _ in tiers.loads] == [400, 400, 300]
    assert bad == BLOCKS[6 * PER_PAGE :]


def test_nothing_is_asked_for_after_the_end(caches) -> None:
    tiers = Tiers()
    assert transfer(tiers, caches).load(load(), until=0.0) == BLOCKS
    assert tiers.loads == []


def fill(caches: dict[str, Any]) -> None:
    for layer in caches.values():
        for page in range(PAGES):
            layer[1 + page * PER_PAGE : 1 + (page + 1) * PER_PAGE] = page


def save() -> SavePages:
    return SavePages("r", b"p" * 16, KEYS, 3, BLOCKS)


def test_only_what_is_wanted_is_copied_out(caches, monkeypatch) -> None:
    fill(caches)
    tiers = Tiers()
    tiers.wanted = [1, 2, 5]
    made = transfer(tiers, caches)
    gathered = []
    real = made._copier.gather
    monkeypatch.setattr(
        made._copier,
        "gather",
        lambda blocks, out: (gathered.append(list(blocks)), real(blocks, out)),
    )
    assert made.save(save(), 5.0) == 3
    assert gathered == [[3, 4, 5, 6], [11, 12]]
    assert {i: set(row) for i, row in tiers.reservation.written.items()} == {1: {1}, 2: {2}, 5: {5}}
    assert tiers.reservation.end == ["commit"]
    assert tiers.reserved == {"depth": 48, "parent": b"p" * 16, "tokens_per_second": 5.0}


def test_nothing_wanted_is_nothing_copied(caches) -> None:
    tiers = Tiers()
    tiers.wanted = []
    made = transfer(tiers, caches)
    assert made.save(save(), None) == 0
    assert made._rows is None
    assert tiers.reservation.end == []


def test_slots_are_given_back_when_a_copy_fails(caches) -> None:
    tiers = Tiers()
    tiers.fault = RuntimeError("the device is gone")
    with pytest.raises(RuntimeError, match="the device is gone"):
        transfer(tiers, caches).save(save(), None)
    assert tiers.reservation.end == ["abort"]


def test_an_arena_that_grew_loses_the_pages_and_nothing_else(caches) -> None:
    tiers = Tiers()
    tiers.fault = UnmappedError("grown")
    assert transfer(tiers, caches).save(save(), None) == 0
    assert tiers.reservation.end == ["outgrown"]


def test_pages_are_as_they_were_before_groups() -> None:
    """Layer after layer, each with the page's blocks in order: what lies on drives stays good."""
    caches = {
        name: torch.arange(256, dtype=torch.uint8).repeat(3 * BLOCK_BYTES // 256).view(3, -1) + seed
        for seed, name in enumerate(LAYERS)
    }
    for name in LAYERS:
        caches[name] = caches[name] + torch.tensor([[0], [50], [100]], dtype=torch.uint8)
    out = torch.empty((1, PAGE_BYTES), dtype=torch.uint8)
    BlockCopier(LAYOUT, caches, 3).gather([2, 1], out)
    expected = torch.cat([caches[name][block] for name in LAYERS for block in (2, 1)])
    assert (out[0] == expected).all()
