"""Every condition reason and every alert has a section that the on-call person can find."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kvtier_api.reasons import Reason

DOCS = Path(__file__).parents[3] / "docs" / "administrator"


def sections() -> dict[str, str]:
    parts = re.split(r"^## (.+)$", (DOCS / "runbooks.md").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("reason", list(Reason), ids=str)
def test_every_reason_has_a_section(reason: Reason) -> None:
    found = sections()
    assert reason.value in found, f"runbooks.md: add a section '## {reason.value}'"
    assert len(found[reason.value].split()) >= 5


def test_no_section_is_about_something_that_is_gone() -> None:
    known = {reason.value for reason in Reason}
    for title in sections():
        assert title in known or title.startswith("KVTier"), f"runbooks.md: remove '## {title}'"
