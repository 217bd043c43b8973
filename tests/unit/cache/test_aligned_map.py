"""Shared mappings at addresses that allow huge pages."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvtier_agent.cache.aligned_map import HUGE_PAGE, map_shared
from kvtier_agent.cache.arena import ShmArena
from kvtier_agent.server.mapping import FileArena
from kvtier_agent.server.protocol import ArenaInfo

SIZES = [1, 4096, 4097, HUGE_PAGE - 4096, HUGE_PAGE, 3 * HUGE_PAGE + 12288]


@pytest.fixture
def descriptor() -> Iterator[int]:
    fd = os.memfd_create("kvtier-test-map")
    yield fd
    os.close(fd)


def mappings(name: str = "kvtier-test-map") -> list[tuple[int, int]]:
    """(start, end) of this process's mappings of the file."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if name in line]
    ranges = (line.split()[0].split("-") for line in lines)
    return [(int(start, 16), int(end, 16)) for start, end in ranges]


@pytest.mark.parametrize("size", SIZES)
def test_it_is_aligned_shared_and_of_the_size(descriptor: int, size: int) -> None:
    os.ftruncate(descriptor, size)
    one, other = map_shared(descriptor, size), map_shared(descriptor, size)
    assert one.ctypes.data % HUGE_PAGE == 0
    assert one.nbytes == size
    one[-1] = 77
    assert other[-1] == 77
    assert os.pread(descriptor, 1, size - 1) == bytes([77])


def test_it_is_unmapped_with_the_last_reference(descriptor: int) -> None:
    os.ftruncate(descriptor, HUGE_PAGE)
    before = len(Path("/proc/self/maps").read_text().splitlines())
    for _ in range(5):
        view: Any = map_shared(descriptor, HUGE_PAGE)[5:10].data
        gc.collect()
        assert len(mappings()) == 1
        view[0] = 1
        del view
    gc.collect()
    assert mappings() == []
    # Nor is any of the address space left that was reserved around it.
    assert len(Path("/proc/self/maps").read_text().splitlines()) < before + 5


def test_what_cannot_be_mapped_raises() -> None:
    with pytest.raises(OSError, match="cannot map") as caught:
        map_shared(-1, 4096)
    assert caught.value.errno == errno.EBADF
    with pytest.raises(OSError, match="cannot map"):
        map_shared(-1, 1 << 62)
    with pytest.raises(ValueError, match="0 bytes"):
        map_shared(-1, 0)


def test_agent_and_client_map_arenas_so(tmp_path: Path) -> None:
    arena = ShmArena(tmp_path / "arena", 3 * HUGE_PAGE)
    client = FileArena(ArenaInfo(1, arena.size_bytes), os.dup(arena.fd))
    try:
        assert arena.bytes.ctypes.data % HUGE_PAGE == 0
        assert client.view(0, 1).ctypes.data % HUGE_PAGE == 0
    finally:
        arena.close()
