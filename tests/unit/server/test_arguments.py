"""What callers may say, and what they hear otherwise: a ValueError that says what to give."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.results import MISS
from kvtier_agent.server import protocol as p
from kvtier_agent.server.arguments import as_keys, checksums, milliseconds, rate, whole
from kvtier_agent.server.client import Client, RefusedError, Stored

KEYS = np.arange(32, dtype=np.uint8).reshape(2, 16)
WIDE = np.zeros((4, 16), np.uint8)


@pytest.mark.parametrize(
    "given",
    [
        KEYS,
        KEYS.reshape(-1),
        np.asfortranarray(KEYS),
        np.repeat(KEYS, 2, axis=0)[::2],
        torch.from_numpy(KEYS.copy()),
        KEYS.tobytes(),
        bytearray(KEYS.tobytes()),
        memoryview(KEYS.tobytes()),
        [row.tobytes() for row in KEYS],
        (row for row in KEYS),
        [memoryview(KEYS[0]), bytearray(KEYS[1])],
    ],
)
def test_keys_in_any_natural_form_are_the_same_keys(given: Any) -> None:
    keys = as_keys(given)
    assert keys.dtype == np.uint8
    assert np.array_equal(keys, KEYS)


@pytest.mark.parametrize("none", [b"", [], np.zeros((0, 16), np.uint8)])
def test_no_keys_are_no_mistake(none: Any) -> None:
    assert as_keys(none).shape == (0, 16)


@pytest.mark.parametrize(
    "given",
    [
        np.arange(4, dtype=np.uint64).reshape(2, 2),
        np.full((1, 16), 300),
        np.full((1, 16), 0.5),
        KEYS.view(np.int8),
        KEYS.reshape(4, 8),
        KEYS.reshape(1, 2, 16),
        np.zeros(15, np.uint8),
        torch.zeros((1, 16), dtype=torch.int64),
        b"a" * 15,
        [b"a" * 8, b"b" * 8],
        [b"a" * 15, b"b" * 17],
        [np.zeros(16, np.uint16)],
        ["a" * 16],
        [1, 2],
        "a" * 16,
        None,
        5,
    ],
)
def test_keys_of_another_form_are_refused_not_converted(given: Any) -> None:
    with pytest.raises(ValueError, match=r"give \(n, 16\) uint8"):
        as_keys(given)


@pytest.mark.parametrize(
    "value", [5, np.int64(5), np.uint8(5), np.float64(5), 5.0, np.array(5), torch.tensor(5)]
)
def test_numbers_of_any_library_will_do(value: Any) -> None:
    assert whole("depth", value, 10) == 5
    assert milliseconds("deadline_milliseconds", value) == 5
    assert rate("tokens_per_second", value) == 5.0


@pytest.mark.parametrize("value", [-1, 11, 5.5, math.nan, math.inf, "5", None, [1]])
def test_a_number_out_of_bounds_is_said_with_its_name(value: Any) -> None:
    with pytest.raises(ValueError, match=r"depth is .*; give a whole number from 0 to 10"):
        whole("depth", value, 10)


@pytest.mark.parametrize("value", [1e-300, 0, -1, 1e10, math.nan, math.inf, "fast"])
def test_a_speed_that_no_engine_has_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"tokens_per_second is .*; give tokens per second from 1"):
        rate("tokens_per_second", value)


def test_checksums_are_not_converted_either() -> None:
    assert checksums(np.array([1, 2], np.uint64), 2).tolist() == [1, 2]
    assert checksums([1, (1 << 64) - 1], 2).tolist() == [1, (1 << 64) - 1]
    for wrong in (np.zeros(1, np.uint64), np.zeros(2), [0.5, 1], [-1, 1], [1 << 64, 1], None):
        with pytest.raises(ValueError, match="checksums must be 2 numbers"):
            checksums(wrong, 2)


@pytest.mark.parametrize("seconds", [0, -1, math.inf, math.nan, None, "1", 1e6])
def test_a_timeout_that_is_none_is_refused_at_once(folder: Any, seconds: Any) -> None:
    with pytest.raises(ValueError, match=r"timeout_seconds is .*; give seconds from 0\.001"):
        Client(folder / "none.sock", Geometry.of_page_bytes(4096, 16), timeout_seconds=seconds)


def test_what_does_not_fit_into_a_hello_is_said_before_it_is_sent(folder: Any) -> None:
    for names in ({"weights": "x" * 5000}, {"weights": "x" * 257}, {"weights": "é" * 600}):
        with pytest.raises(ValueError, match=r"of the geometry has \d+ characters"):
            Client(folder / "none.sock", Geometry.of_page_bytes(4096, 16, **names))
    with pytest.raises(ValueError, match="name is no text"):
        Client(folder / "none.sock", Geometry.of_page_bytes(4096, 16), name="\ud800")


def test_numpy_numbers_go_all_the_way(
    agent: Any, connect: Callable[..., Client], pages_of: Callable[..., Any]
) -> None:
    client, pages = connect(agent.socket(), timeout_seconds=np.float32(15)), pages_of(1, 4)
    stored = client.put(
        pages.keys, pages.bytes, depth=np.int64(16), tokens=np.int64(64), parent=WIDE[0],
        tokens_per_second=np.float32(1e4),
    )  # fmt: skip
    assert stored.stored == 4
    found = client.lookup(
        pages.keys, depth=np.int32(16), total_tokens=np.int64(96), request=np.uint64(7),
        slo_milliseconds=np.float64(900),
    )  # fmt: skip
    assert found.prefix == 4
    with client.load(pages.keys, deadline_milliseconds=np.int64(5000)) as lease:
        assert lease.prefix == 4
    with client.load(pages.keys, deadline_milliseconds=5000.5) as lease:
        assert lease.prefix == 4


def test_a_callers_own_mistake_is_no_missing_agent(
    agent: Any, connect: Callable[..., Client], pages_of: Callable[..., Any]
) -> None:
    client, pages = connect(agent.socket()), pages_of(1, 2)
    for call in (
        lambda: client.lookup(pages.keys, depth=-1),
        lambda: client.lookup(pages.keys, total_tokens=1 << 40),
        lambda: client.lookup(pages.keys, request=-1),
        lambda: client.load(pages.keys, deadline_milliseconds=-1),
        lambda: client.put(pages.keys, pages.bytes, parent=b"abc"),
        lambda: client.put(pages.keys, pages.bytes, frozen="x" * 300),
        lambda: client.put(pages.keys, pages.bytes, tokens_per_second=1e-300),
        lambda: client.put(pages.keys, pages.bytes, tokens=0.5),
    ):
        with pytest.raises(ValueError, match="give"):
            call()
    assert client.counters.refusals == 0
    assert client.stats()["reservations"] == 0
    assert client.lookup(pages.keys).tiers.tolist() == [MISS, MISS]


def test_the_agent_refuses_a_speed_by_its_name_whoever_asks(
    agent: Any, connect: Callable[..., Client], pages_of: Callable[..., Any]
) -> None:
    client, pages = connect(agent.socket()), pages_of(1, 2)
    assert client.ping()
    connection = client._link.connection
    assert connection is not None
    before = agent.call(lambda: agent.core.cache.worth.rate)
    for speed in (1e-300, math.nan, 1e12, -5.0):
        message = msgspec.structs.replace(p.Reserve(connection.next_id()), tokens_per_second=speed)
        with pytest.raises(RefusedError, match="tokens_per_second is"):
            connection.request(message, (pages.keys.data,), 15.0, p.Reserved)
    assert agent.call(lambda: agent.core.cache.worth.rate) == before


def test_a_page_of_another_size_overwrites_no_other(
    agent: Any, connect: Callable[..., Client], pages_of: Callable[..., Any]
) -> None:
    client, pages, more = connect(agent.socket()), pages_of(1, 3), pages_of(2, 2)
    held = client.reserve(pages.keys)
    size = client.page_bytes
    for wrong in (bytes(2 * size), bytes(size - 1), bytes(0), np.zeros((size, 2), np.uint8)[:, 0]):
        with pytest.raises(ValueError, match=f"contiguous buffer of {size} bytes"):
            held.write(0, wrong)
    for wrong in (bytes(2 * size), bytes(4 * size)):
        with pytest.raises(ValueError, match=f"contiguous buffer of {3 * size} bytes"):
            held.write_rows(wrong)
    for index in (-1, 3):
        with pytest.raises(ValueError, match=f"page {index} has no slot"):
            held.write(index, pages.bytes[0])
        with pytest.raises(ValueError, match=f"page {index} has no slot"):
            held.view(index)
    held.write(0, pages.bytes[0].view(np.uint64))
    with pytest.raises(ValueError, match=r"page 1 was not written \(2 of 3\)"):
        held.commit()
    with pytest.raises(ValueError, match="checksums must be 3"):
        held.commit(np.zeros(2, np.uint64))
    held.write(1, pages.bytes[1])
    held.write(2, pages.bytes[2].data)
    assert held.commit().tolist() == [Stored.STORED] * 3
    with pytest.raises(ValueError, match="reservation has ended"):
        held.write(0, pages.bytes[0])
    assert client.put(more.keys, more.bytes).stored == 2
    for stored in (pages, more):
        out = np.zeros_like(stored.bytes)
        with client.load(stored.keys) as lease:
            assert lease.copy_to(out).all()
        assert np.array_equal(out, stored.bytes)


def test_a_copy_of_another_size_is_no_bad_page_and_a_row_holds_one_page(
    agent: Any, connect: Callable[..., Client], pages_of: Callable[..., Any]
) -> None:
    client, pages = connect(agent.socket()), pages_of(1, 3)
    assert client.put(pages.keys, pages.bytes).stored == 3
    out = np.zeros((5, client.page_bytes), np.uint8)
    with client.load(pages.keys) as lease:
        with pytest.raises(ValueError, match="give a contiguous buffer"):
            lease.verify(0, pages.bytes[0][:-1])
        with pytest.raises(ValueError, match="a row twice"):
            lease.copy_to(out, rows=[0, 0, 0])
        assert lease.verify(0, pages.bytes[0])
        assert lease.copy_to(out, rows=[4, 0, 2]).all()
    assert client.counters.bad_pages == 0
