"""A page that calls `kvtier` says first how the shell comes to know it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CALL = re.compile(r"^(?:\$ | {4})?(?:kvtier|python) (?!-m pytest)", re.MULTILINE)
BLOCK = re.compile(r"^```(?:sh|console)\n.*?^```|(?:^ {4}\S.*\n)+", re.MULTILINE | re.DOTALL)
PAGES = sorted([*(ROOT / "docs/user").glob("*.md"), *(ROOT / "examples").rglob("*.md")])
CALLING = [p for p in PAGES if any(CALL.search(b) for b in BLOCK.findall(p.read_text("utf-8")))]


def test_there_are_pages_to_look_at() -> None:
    assert len(CALLING) >= 4


@pytest.mark.parametrize("page", CALLING, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_shell_knows_the_command_before_it_is_called(page: Path) -> None:
    text = page.read_text("utf-8")
    first = min(text.index(b) for b in BLOCK.findall(text) if CALL.search(b))
    called = first + CALL.search(text[first:]).start()  # type: ignore[union-attr]
    assert ".venv/bin/activate" in text[:called]
