"""What outlives a restart is written whole, read carefully, and never goes back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kvtier_agent.node import counters
from kvtier_agent.node.statefile import StateFile


def test_round_trip_is_private_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "state.json", layout=1)
    assert file.read() == (None, "")
    file.write({"a": [1, 2]})
    assert file.read() == ({"layout": 1, "a": [1, 2]}, "")
    assert (tmp_path / "state.json").stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param('{"layout": 1, "a"', id="torn"),
        pytest.param("", id="empty"),
        pytest.param("[1]", id="no object"),
        pytest.param('{"layout": 2}', id="newer layout"),
        pytest.param('{"layout": 1, "a": "' + "x" * (5 << 20) + '"}', id="huge"),
        pytest.param("\x00\xff", id="rubbish"),
    ],
)
def test_a_damaged_file_is_set_aside_with_its_reason(tmp_path: Path, text: str) -> None:
    path = tmp_path / "state.json"
    path.write_text(text)
    file = StateFile(path, layout=1)
    document, problem = file.read()
    assert document is None
    assert "state.json.bad" in problem
    assert (tmp_path / "state.json.bad").read_text() == text
    file.write({"a": 1})
    assert file.read()[0] == {"layout": 1, "a": 1}


def test_a_failed_write_leaves_the_old_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = StateFile(tmp_path / "state.json", layout=1)
    file.write({"a": 1})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        file.write({"a": 2})
    assert json.loads((tmp_path / "state.json").read_text())["a"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


def test_counters_add_up_over_processes() -> None:
    assert counters.total({"a": 5, "old": 2}, {"a": 1, "new": 3}) == {"a": 6, "new": 3, "old": 2}
