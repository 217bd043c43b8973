"""The reference pages are those of the code."""

from __future__ import annotations

import pytest
import reference
from kvtier_api import Reason
from kvtier_cli.main import COMMANDS


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return reference.pages()


def test_committed_pages_are_current(pages: dict[str, str]) -> None:
    stale = [name for name, text in pages.items() if (reference.FOLDER / name).read_text() != text]
    assert stale == [], "run make reference"


def test_every_field_reason_and_command_has_its_line(pages: dict[str, str]) -> None:
    assert all(f"`{reason.value}`" in pages["reasons.md"] for reason in Reason)
    assert all(f"## kvtier {name}" in pages["commands.md"] for name in COMMANDS)
    for field in ("thresholdMicrosecondsPerMiB", "ttftP99Milliseconds", "reservePercent"):
        assert f"`{field}`" in pages["policy.md"]
    assert "`nvmeBytesWritten`" in pages["node.md"]
