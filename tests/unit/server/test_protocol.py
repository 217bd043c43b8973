"""What crosses the socket, and what is not let in."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from kvtier_agent.cache.geometry import Geometry, GeometryError
from kvtier_agent.server import protocol as p

GEOMETRY = Geometry(
    layers=80, kv_heads=8, head_size=128, dtype_bytes=2, page_tokens=16, tp=4, weights="w1",
    dtype="bf16", layout="avx512",
)  # fmt: skip
INFO = p.GeometryInfo.of(GEOMETRY)


@pytest.mark.parametrize(
    "message",
    [
        p.Hello(1, 1, 2, 1, 1, INFO, "engine", 77, True, 1 << 40, 3, "search"),
        p.Lookup(2, 512, 800, 4096, 9),
        p.Reserve(3, 16, bytes(16), True, "bot", 20_000.0),
        p.Commit(4, 99),
        p.Abort(0, 99),
        p.Load(5, 250, 9),
        p.Release(0, 99, 12),
        p.Pin(8, 99),
        p.Unpin(0, 99),
        p.Delete(9, 99),
        p.Stats(6),
        p.Ping(7),
        p.Bye(0),
    ],
    ids=lambda m: type(m).__name__,
)
def test_a_request_comes_back_as_it_was(message: p.Request) -> None:
    assert p.decode_request(p.encode(message)) == message
    assert p.request_id(p.encode(message)) == message.id


def test_a_geometry_travels_whole() -> None:
    hello = p.decode_request(p.encode(p.Hello(1, 1, 1, 1, 1, INFO)))
    assert isinstance(hello, p.Hello)
    assert hello.geometry.geometry() == GEOMETRY


def test_a_geometry_that_makes_no_sense_is_an_error_with_advice() -> None:
    with pytest.raises(GeometryError, match="layers is 0"):
        p.GeometryInfo(0, 1, 1, 1, 1).geometry()


def test_fields_that_a_newer_peer_appended_are_skipped() -> None:
    class Newer(p.Request, tag="pi", frozen=True):
        extra: str = "of version N + 1"

    assert p.decode_request(p.encode(Newer(4))) == p.Ping(4)


def test_fields_that_an_older_peer_does_not_know_get_their_default() -> None:
    assert p.decode_request(msgspec.msgpack.encode(["lk", 3])) == p.Lookup(3)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(["zz", 1]),
        msgspec.msgpack.encode(["cm", 1]),
        msgspec.msgpack.encode(["lk", -1]),
        msgspec.msgpack.encode(["lk", 1, -5]),
        msgspec.msgpack.encode(["lk", 1, 1 << 40]),
        msgspec.msgpack.encode(["lk", "one"]),
        msgspec.msgpack.encode(["rs", 1, 0, bytes(17)]),
        msgspec.msgpack.encode(["rs", 1, 0, b"", False, "x" * 300]),
        msgspec.msgpack.encode(["rs", 1, 0, b"", False, None, float("nan")]),
        msgspec.msgpack.encode(["pn", 1, -1]),
        p.encode(p.Hello(1, 1, 1, 1, 1, INFO, tenant="Two Words")),
        p.encode(p.Hello(1, 1, 1, 1, 1, INFO, tenant="x" * 64)),
        msgspec.msgpack.encode({"t": "lk", "id": 1}),
        p.encode(p.Ping(1)) + bytes(5000),
        b"\x91" * 3000,
    ],
    ids=range(17),
)
def test_a_header_that_breaks_the_rules_is_malformed(header: bytes) -> None:
    with pytest.raises(p.MalformedError):
        p.decode_request(header)
    assert p.request_id(header) >= 0


def test_random_headers_never_do_anything_but_decode_or_be_malformed() -> None:
    rng = random.Random(3)
    seeds = [
        p.encode(p.Hello(1, 1, 1, 1, 1, INFO)),
        p.encode(p.Load(5, 1)),
        p.encode(p.Commit(1, 2)),
    ]
    malformed = 0
    for _ in range(20_000):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        data = data[: rng.randint(0, len(data))] if rng.random() < 0.3 else data
        try:
            p.decode_request(bytes(data))
        except p.MalformedError:
            malformed += 1
        assert p.request_id(bytes(data)) >= 0
    assert malformed > 5000


def test_keys_are_one_buffer_of_sixteen_bytes_each() -> None:
    keys = np.arange(48, dtype=np.uint8).reshape(3, 16)
    assert np.array_equal(p.keys_of(keys.tobytes(), 3), keys)
    with pytest.raises(p.MalformedError, match="no multiple"):
        p.keys_of(bytes(17), 3)
    with pytest.raises(p.MalformedError, match="at most 2"):
        p.keys_of(bytes(48), 2)


def test_a_column_of_another_length_is_malformed() -> None:
    assert p.column(bytes(16), "<u8", 2).tolist() == [0, 0]
    with pytest.raises(p.MalformedError):
        p.column(bytes(15), "<u8", 2)


@pytest.mark.parametrize(
    ("ours", "theirs", "common"),
    [
        ((1, 1), (1, 1), 1),
        ((1, 2), (1, 1), 1),
        ((1, 2), (2, 3), 2),
        ((2, 3), (1, 2), 2),
        ((2, 3), (4, 5), None),
        ((2, 3), (1, 1), None),
        ((1, 2), (3, 1), None),
    ],
)
def test_both_sides_take_the_highest_version_they_share(
    ours: tuple[int, int], theirs: tuple[int, int], common: int | None
) -> None:
    assert p.common_version(ours, theirs) == common
