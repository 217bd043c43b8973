"""What the pages point at is there: files, headings, commands with their options, make targets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import reference

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(r"`((?:docs|examples|charts|tests|tools|crds|requirements)/[\w./-]*\w)`")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"\bkvtier (agent|operator|replay|inspect|policy validate)\b([^\n`|#]*)")


def text_of(page: Path) -> str:
    return page.read_text("utf-8")


def anchors_of(page: Path) -> set[str]:
    """As code hosts make them from headings."""
    headings = HEADING.findall(FENCE.sub("", text_of(page)))
    return {re.sub(r"[^\w -]", "", h.lower()).strip().replace(" ", "-") for h in headings}


@pytest.fixture(scope="module")
def options() -> dict[str, set[str]]:
    """Of each command, from the reference page, which is made from the commands themselves."""
    sections = re.split(r"^## kvtier (.+)$", reference.pages()["commands.md"], flags=re.MULTILINE)
    return {
        name: set(re.findall(r"`(--[\w-]+)`", body)) | {"--help"}
        for name, body in zip(sections[1::2], sections[2::2], strict=True)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(FENCE.sub("", text_of(page))):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        other = (page.parent / name).resolve() if name else page
        assert other.exists(), f"{target}: no such file"
        assert not anchor or anchor in anchors_of(other), f"{target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    missing = [path for path in PATH.findall(text_of(page)) if not (ROOT / path).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_options_in_examples_exist(page: Path, options: dict[str, set[str]]) -> None:
    joined = text_of(page).replace("\\\n", " ")
    for command, rest in COMMAND.findall(joined):
        unknown = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", rest)) - options[command]
        assert unknown == set(), f"kvtier {command} has no {unknown}"


def test_make_targets_in_the_pages_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set()
    for page in PAGES:
        text = text_of(page)
        named |= set(re.findall(r"`make ([a-z][a-z-]*)", text))
        for block in FENCE.findall(text):
            named |= set(re.findall(r"^(?:\$ )?make ([a-z][a-z-]*)", block, re.MULTILINE))
    assert {"setup", "demo", "test"} <= named
    assert named <= targets
