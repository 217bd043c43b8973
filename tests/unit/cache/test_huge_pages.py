"""Huge pages behind an arena: asked for step by step, at best effort, and without the interpreter's
lock."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvtier_agent.cache import arena as module
from kvtier_agent.cache.arena import BACK_STEP, HUGE_PAGE, MADV_COLLAPSE, ShmArena


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[ShmArena]:
    made = ShmArena(tmp_path / "l1", 3 * BACK_STEP)
    yield made
    made.close()


class Kernel:
    """Stands for the C library: keeps what it was asked, refuses from some call on."""

    def __init__(self, refuse_from: int = 1 << 30) -> None:
        self.asked: list[tuple[int, int, int]] = []
        self.refuse_from = refuse_from

    def madvise(self, start: int, length: int, advice: int) -> int:
        self.asked.append((start, length, advice))
        return -1 if len(self.asked) > self.refuse_from else 0


def test_the_call_is_one_that_lets_other_threads_run() -> None:
    assert isinstance(module._libc, ctypes.CDLL)
    assert not isinstance(module._libc, ctypes.PyDLL), "PyDLL keeps the interpreter's lock"


def test_whole_huge_pages_are_asked_for_step_by_step(
    arena: ShmArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel()
    monkeypatch.setattr(module, "_libc", kernel)
    assert arena.collapse(2 * BACK_STEP + HUGE_PAGE + 4096)
    base = arena.bytes.ctypes.data
    assert kernel.asked == [
        (base, BACK_STEP, MADV_COLLAPSE),
        (base + BACK_STEP, BACK_STEP, MADV_COLLAPSE),
        (base + 2 * BACK_STEP, HUGE_PAGE, MADV_COLLAPSE),
    ]


def test_a_kernel_that_refuses_is_not_asked_on(
    arena: ShmArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel(refuse_from=1)
    monkeypatch.setattr(module, "_libc", kernel)
    assert not arena.collapse(3 * BACK_STEP)
    assert len(kernel.asked) == 2


def test_less_than_a_huge_page_is_left_alone(
    arena: ShmArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel()
    monkeypatch.setattr(module, "_libc", kernel)
    assert not arena.collapse(HUGE_PAGE - 1)
    assert kernel.asked == []


def test_memory_is_had_in_steps_that_are_seen(arena: ShmArena) -> None:
    steps: list[int] = []
    arena.back_first(BACK_STEP + 4096, lambda: steps.append(arena.backed_bytes))
    assert steps == [BACK_STEP, BACK_STEP + 4096]
