"""Memory that was freed goes back to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest
from kvtier_agent import heap

FRAGMENTS = """
import os
from kvtier_agent.bench.machine import heap_bytes
from kvtier_agent.heap import give_back
large, small = [], []
for _ in range(600):
    large.append(bytearray(b"x") * 100_000)
    small.append(bytearray(b"x") * 20_000)  # between them, and it stays
del large
before = heap_bytes(os.getpid())
gave = give_back()
print(gave, before - heap_bytes(os.getpid()))
"""


@pytest.mark.skipif(heap._TRIM is None, reason="this C library has no malloc_trim")
def test_what_lies_between_blocks_in_use_is_given_back() -> None:
    words = [sys.executable, "-c", FRAGMENTS]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    gave, given_bytes = done.stdout.split()
    assert gave == "True"
    assert int(given_bytes) > 40_000_000


def test_where_there_is_no_way_to_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_TRIM", None)
    assert not heap.give_back()
