"""Copies with checksums: extension and fallback do the same, and neither leaves a buffer."""

from __future__ import annotations

import mmap
import sys
import threading
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtier_agent import native
from kvtier_agent.native import NativeCopier, PythonCopier

needs_extension = pytest.mark.skipif(
    native.NATIVE is None, reason=f"without the extension: {native.WHY_NOT}"
)
COPIERS = [
    pytest.param(PythonCopier(), id="python"),
    pytest.param(
        None if native.NATIVE is None else NativeCopier(native.NATIVE),
        id="native",
        marks=needs_extension,
    ),
]
SIZE = 20_000


def random_bytes(n: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, n, dtype=np.uint8)


def offsets(*values: int) -> Any:
    return np.array(values, np.uint64)


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, list[int], list[int], int, int]:
    """(length, source offsets, target offsets, misalignment of source, of target)."""
    length = draw(st.one_of(st.integers(0, 1100), st.integers(0, SIZE)))
    n = draw(st.integers(0, 5))
    places = st.lists(st.integers(0, SIZE - length), min_size=n, max_size=n)
    shift = st.integers(0, 64)
    return length, draw(places), draw(places), draw(shift), draw(shift)


def expected(source: Any, target: Any, starts: list[int], ends: list[int], length: int) -> Any:
    """The same by slices: (sums, target afterwards)."""
    after = target.copy()
    for start, end in zip(starts, ends, strict=True):
        after[end : end + length] = source[start : start + length]
    sums = [xxhash.xxh3_64_intdigest(source[s : s + length].tobytes()) for s in starts]
    return np.array(sums, np.uint64), after


@settings(max_examples=300, deadline=None)
@given(batch=batches(), private=st.sampled_from(["source", "target"]))
def test_the_fallback_copies_and_sums(batch: Any, private: Any) -> None:
    length, starts, ends, _, _ = batch
    source, target = random_bytes(SIZE, 1), random_bytes(SIZE, 2)
    sums, after = expected(source, target, starts, ends, length)
    got = PythonCopier().copy(
        source, offsets(*starts), target, offsets(*ends), length, private=private
    )
    assert np.array_equal(got, sums)
    assert np.array_equal(target, after)
    assert np.array_equal(PythonCopier().checksums(source, offsets(*starts), length), sums)


@needs_extension
@settings(max_examples=600, deadline=None)
@given(batch=batches(), streaming=st.booleans(), data=st.data())
def test_the_extension_equals_the_fallback_with_every_kernel(
    batch: Any, streaming: bool, data: Any
) -> None:
    length, starts, ends, here, there = batch
    kernel = data.draw(st.sampled_from(native.NATIVE.kernels()))
    source = random_bytes(SIZE + 64, 1)[here : here + SIZE]
    before = random_bytes(SIZE + 128, 2)
    ours, oracle = before.copy(), before.copy()
    at = slice(there, there + SIZE)
    sums = PythonCopier().copy(
        source, offsets(*starts), oracle[at], offsets(*ends), length, private="target"
    )
    got = np.empty(len(starts), np.uint64)
    native.NATIVE.copy_checksums(
        source, offsets(*starts), ours[at], offsets(*ends), length, got, streaming, kernel
    )
    assert np.array_equal(got, sums)
    assert np.array_equal(ours, oracle)  # nothing beside the pieces either
    native.NATIVE.checksums(source, offsets(*starts), length, got, kernel)
    assert np.array_equal(got, sums)


@pytest.mark.parametrize("copier", COPIERS)
@pytest.mark.parametrize("length", [(1 << 20) - 1, 1 << 20, (1 << 21) + 17])
def test_large_pieces(copier: Any, length: int) -> None:
    source, target = random_bytes(3 * length), np.zeros(2 * length, np.uint8)
    sums = copier.copy(
        source, offsets(length, 3), target, offsets(0, length), length, private="target"
    )
    assert np.array_equal(target[:length], source[length : 2 * length])
    assert np.array_equal(target[length:], source[3 : 3 + length])
    assert sums.tolist() == [
        xxhash.xxh3_64_intdigest(target[:length]),
        xxhash.xxh3_64_intdigest(target[length:]),
    ]
    assert copier.checksum(target[:length]) == sums[0]
    assert copier.checksum(b"") == xxhash.xxh3_64_intdigest(b"")


@pytest.mark.parametrize("copier", COPIERS)
@pytest.mark.parametrize("bad", [81, 100, 1 << 63, (1 << 64) - 1, (1 << 64) - 20])
def test_an_offset_outside_raises_before_anything_is_copied(copier: Any, bad: int) -> None:
    source, target = random_bytes(100), np.zeros(100, np.uint8)
    with pytest.raises(IndexError, match=r"20 bytes at offset \d+ \(number 1\)"):
        copier.copy(source, offsets(0, bad), target, offsets(0, 20), 20, private="target")
    with pytest.raises(IndexError, match="past the end of target, which has 100 bytes"):
        copier.copy(source, offsets(0, 20), target, offsets(0, bad), 20, private="target")
    with pytest.raises(IndexError, match="past the end of source"):
        copier.checksums(source, offsets(0, bad), 20)
    assert not target.any()


@pytest.mark.parametrize("copier", COPIERS)
def test_a_length_longer_than_the_buffer_raises(copier: Any) -> None:
    with pytest.raises(IndexError):
        copier.checksums(random_bytes(100), offsets(0), 101)
    with pytest.raises(IndexError):
        copier.copy(
            random_bytes(100), offsets(0), bytearray(101), offsets(0), 101, private="target"
        )


@pytest.mark.parametrize("copier", COPIERS)
def test_pieces_of_one_buffer_may_move_but_not_overlap(copier: Any) -> None:
    memory = random_bytes(100)
    old = memory.copy()
    copier.copy(memory, offsets(0, 20), memory, offsets(60, 40), 20, private="target")
    assert np.array_equal(memory[60:80], old[:20])
    assert np.array_equal(memory[40:60], old[20:40])
    for start in (41, 60, 79):
        with pytest.raises(ValueError, match="overlap"):
            copier.copy(memory, offsets(0, start), memory, offsets(80, 60), 20, private="target")
    assert np.array_equal(memory[:20], old[:20])


@pytest.mark.parametrize("copier", COPIERS)
def test_arrays_and_buffers_of_the_wrong_kind_are_refused(copier: Any) -> None:
    source = random_bytes(100)
    with pytest.raises(ValueError, match="writable"):
        copier.copy(source, offsets(0), bytes(100), offsets(0), 10, private="target")
    with pytest.raises(ValueError, match="uint64"):
        copier.copy(source, np.array([0]), bytearray(100), offsets(0), 10, private="target")
    with pytest.raises(ValueError, match="2 source_offsets for 1 target_offsets"):
        copier.copy(source, offsets(0, 1), bytearray(100), offsets(0), 10, private="target")
    with pytest.raises((ValueError, BufferError)):
        copier.copy(source[::2], offsets(0), bytearray(100), offsets(0), 10, private="target")


@needs_extension
def test_sums_of_the_wrong_kind_are_refused() -> None:
    source, target, one = random_bytes(100), bytearray(100), offsets(0)
    for sums in (np.empty(2, np.uint64), np.empty(1, np.int64), np.empty(1, np.float64), bytes(8)):
        with pytest.raises(ValueError, match="sums"):
            native.NATIVE.copy_checksums(source, one, target, one, 10, sums)
    with pytest.raises(ValueError, match="no kernel"):
        native.NATIVE.checksums(source, one, 10, np.empty(1, np.uint64), "sse9")


@needs_extension
def test_other_threads_run_during_a_copy() -> None:
    """The copy is of memory that a thread of Python keeps changing: the lock is free, and the sum
    is that of the bytes that arrived, whichever they were."""
    length = 1 << 20
    source = mmap.mmap(-1, length)
    target = np.zeros(length, np.uint8)
    stop, rounds = threading.Event(), 0
    copier = NativeCopier(native.NATIVE)

    def scribble() -> None:
        nonlocal rounds
        while not stop.is_set():
            rounds += 1
            view = np.frombuffer(source, np.uint8)
            view += 1

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        changed = 0
        for _ in range(200):
            before = rounds
            for streaming in (False, True):
                sums = np.empty(1, np.uint64)
                native.NATIVE.copy_checksums(
                    source, offsets(0), target, offsets(0), length, sums, streaming
                )
                assert sums[0] == xxhash.xxh3_64_intdigest(target)
            assert copier.copy(source, offsets(0), target, offsets(0), length, private="target")[
                0
            ] == (xxhash.xxh3_64_intdigest(target))
            changed += rounds != before
    finally:
        stop.set()
        thread.join()
    assert changed


def test_the_variable_leaves_the_extension_out() -> None:
    assert native.load({"KVTIER_NATIVE": "0"}) == (None, "KVTIER_NATIVE=0")
    module, why = native.load({"KVTIER_NATIVE": "off"})
    assert module is None
    assert "write 1 to use the extension, or 0 not to" in why
    assert (native.NATIVE is None) == bool(native.WHY_NOT)


def test_an_extension_of_an_older_version_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    older = ModuleType("kvtier_native")
    for name in native.NEEDED[1:]:
        setattr(older, name, object())
    monkeypatch.setitem(sys.modules, "kvtier_native", older)
    module, why = native.load({})
    assert module is None
    assert why == f"kvtier_native is of another version: it lacks {native.NEEDED[0]}"
