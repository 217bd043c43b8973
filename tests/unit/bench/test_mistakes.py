"""Mistakes are one line that says what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvtier_agent.bench import l2
from kvtier_agent.bench.errors import BenchError
from kvtier_cli.main import app
from typer.testing import CliRunner


@pytest.mark.parametrize(
    ("words", "sentence", "status"),
    [
        (("memory", "--pages", "0"), "--pages: write at least 1, not '0'", 2),
        (("memory", "--page-bytes", "5000"), "--page-bytes: write a multiple of 4096, not 5000", 2),
        (("memory", "--page-bytes", "much"), "not a size", 2),
        (("lookup", "--keys", "many"), "--keys: write a number", 2),
        (("endtoend", "--prompt-tokens", "100"), "write a larger --prompt-tokens", 1),
        (("endtoend", "--page-tokens", "3000"), "write a multiple of 6000", 1),
        (("l2", "--volume", "/no/such/folder"), "is no folder; make it first", 2),
        (("l2", "--pages", "128", "--depth", "32"), "write at least --pages 2048", 1),
    ],
)
def test_a_wrong_value_is_answered_by_what_to_write(
    words: tuple[str, ...], sentence: str, status: int
) -> None:
    done = CliRunner().invoke(app, ["bench", *words])
    assert done.exit_code == status, done.output
    assert sentence in " ".join(done.stderr.split())
    assert done.stdout == ""


@pytest.mark.parametrize("words", [("nothing",), ("memory", "--no-such-option"), ("memory", "x")])
def test_wrong_usage_is_status_two(words: tuple[str, ...]) -> None:
    assert CliRunner().invoke(app, ["bench", *words]).exit_code == 2


def test_memory_is_no_drive() -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        pytest.skip("there is no /dev/shm here")
    with pytest.raises(BenchError, match="not a drive"):
        l2.check_volume(shm)
