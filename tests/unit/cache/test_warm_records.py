"""Which records of an earlier process are believed: each rule, and all of them on garbage."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from kvtier_agent.cache.record import NO_SLOT, RECORD, Flag, State, seals
from kvtier_agent.cache.table_remains import CHUNK_RECORDS, RemainsError, _records
from kvtier_agent.cache.table_view import HEADER_BYTES
from kvtier_agent.cache.warm import choose
from kvtier_agent.cache.words import take_records

PAGE = 4096


def pages(count: int, seed: int = 0) -> np.ndarray:
    """Records of pages that lie in L1 as they should, touched in the order of their rows."""
    dice = np.random.default_rng(seed)
    records = np.zeros(count, dtype=RECORD)
    records["key"] = dice.integers(1, 1 << 63, (count, 2))
    records["parent"] = dice.integers(1, 1 << 63, (count, 2))
    records["checksum"] = dice.integers(0, 1 << 63, count)
    records["size"] = PAGE
    records["depth"] = 16 * np.arange(count)
    records["state"] = State.IN1
    records["tiers"] = 2
    records["seq"] = 8
    records["touch"] = np.arange(1, count + 1)
    records["l1_slot"] = dice.permutation(count)
    records["l0_slot"] = records["l2_slot"] = NO_SLOT
    records["seal"] = seals(records)
    return records


def kept(records: np.ndarray, room: int = 1 << 20) -> tuple[list[int], dict[str, int]]:
    """Touch stamps of what is kept, and what is dropped."""
    found = choose(records, page_bytes=PAGE, slots=len(records), room=room)
    return found.records()["touch"].tolist(), dict(found.dropped)


def test_whole_pages_are_kept_in_the_order_of_their_use() -> None:
    records = pages(100)
    records["touch"] = np.random.default_rng(1).permutation(100) + 1
    records["state"][:30] = State.UP10
    records["state"][30:60] = State.DOWN12
    assert kept(records) == (list(range(1, 101)), {})


def test_of_too_many_the_least_recently_used_go() -> None:
    assert kept(pages(10), room=3) == ([8, 9, 10], {"room": 7})


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("state", State.IN0, "hbm"),
        ("state", State.DOWN01, "hbm"),
        ("state", State.WRITING, "unfinished"),
        ("seq", 7, "unfinished"),
        ("flags", Flag.DOOMED, "doomed"),
        ("state", 9, "inconsistent"),
        ("state", 200, "inconsistent"),
        ("flags", Flag.PARTIAL, "inconsistent"),
        ("flags", 64, "inconsistent"),
        ("size", PAGE - 1, "inconsistent"),
        ("size", 0, "inconsistent"),
        ("tiers", 4, "inconsistent"),
        ("key", 0, "inconsistent"),
        ("l1_slot", 5, "inconsistent"),
        ("l1_slot", NO_SLOT, "unfinished"),
        ("checksum", 1, "inconsistent"),
        ("parent", 1, "inconsistent"),
        ("depth", 1, "inconsistent"),
        ("seal", 0, "inconsistent"),
    ],
)
def test_a_record_that_cannot_be_is_dropped_and_no_other(
    field: str, value: int, reason: str
) -> None:
    records = pages(5)
    records[field][2] = value
    assert kept(records) == ([1, 2, 4, 5], {reason: 1})


@pytest.mark.parametrize("state", [State.FREE, State.IN2, State.UP21])
def test_what_is_not_in_memory_is_no_loss(state: State) -> None:
    records = pages(5)
    records["state"][2] = state
    records["l1_slot"][2] = NO_SLOT
    assert kept(records) == ([1, 2, 4, 5], {})


@pytest.mark.parametrize("state", [State.IN1, State.WRITING, State.UP21, State.DOWN01])
def test_of_two_that_claim_a_slot_neither_is_believed(state: State) -> None:
    records = pages(6)
    records["l1_slot"][1] = records["l1_slot"][4]
    records["state"][1] = state
    stamps, dropped = kept(records)
    assert stamps == [1, 3, 4, 6]
    assert dropped["conflict"] >= 1


def test_of_two_with_one_key_neither_is_believed() -> None:
    records = pages(6)
    for name in ("key", "parent"):
        records[name][1] = records[name][4]
    records["seal"] = seals(records)
    assert kept(records) == ([1, 3, 4, 6], {"conflict": 2})


def test_a_page_stored_anew_while_the_doomed_one_is_read_is_kept() -> None:
    records = pages(6)
    records["key"][1] = records["key"][4]
    records["flags"][1] = Flag.DOOMED
    records["seal"] = seals(records)
    assert kept(records) == ([1, 3, 4, 5, 6], {"doomed": 1})


def test_two_records_that_changed_places_in_part_are_not_believed() -> None:
    records = pages(6)
    for name in ("checksum", "l1_slot"):  # the bytes would match, and be another page's
        records[name][[1, 2]] = records[name][[2, 1]]
    assert kept(records) == ([1, 4, 5, 6], {"inconsistent": 2})


@pytest.mark.parametrize("seed", range(20))
def test_garbage_among_the_records_costs_those_it_hit_alone(seed: int) -> None:
    dice = np.random.default_rng(seed)
    records = pages(200, seed)
    hit = np.flatnonzero(dice.random(200) < 0.3)
    raw = records.view(np.uint8).reshape(200, RECORD.itemsize)
    raw[hit] = dice.integers(0, 256, (len(hit), RECORD.itemsize), dtype=np.uint8)
    stamps, _ = kept(records)
    untouched = set(range(1, 201)) - set((hit + 1).tolist())
    claimed = set(records["l1_slot"][hit].tolist())
    honest = {s for s in untouched if int(records["l1_slot"][s - 1]) not in claimed}
    assert honest <= set(stamps) <= untouched


@pytest.mark.parametrize("count", [0, 1, CHUNK_RECORDS, 2 * CHUNK_RECORDS + 5])
def test_of_an_old_table_only_what_may_be_in_dram_is_kept(tmp_path: Path, count: int) -> None:
    chance = np.random.default_rng(count)
    records = np.zeros(count, dtype=RECORD)
    records["state"] = chance.choice([State.FREE, State.IN1, State.IN2, State.UP21, 200], count)
    records["l1_slot"] = chance.choice([NO_SLOT, 7], count)
    records["touch"] = np.arange(count)
    path = tmp_path / "table"
    path.write_bytes(bytes(HEADER_BYTES) + records.tobytes())
    with path.open("rb") as file:
        found = _records(file.fileno(), count, path)
        with pytest.raises(RemainsError, match="cut short"):
            _records(file.fileno(), count + 1, path)
    out = (records["state"] == State.FREE) | (
        (records["state"] == State.IN2) & (records["l1_slot"] == NO_SLOT)
    )
    assert found.tobytes() == take_records(records, np.flatnonzero(~out)).tobytes()
