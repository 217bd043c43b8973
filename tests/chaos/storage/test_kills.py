"""Real SIGKILLs under load on a real file system; 200 of them in `make crash`."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
from crash.__main__ import main
from crash.kills import KillTally, kill_run


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
def test_a_kill_costs_no_page_on_nvme_and_brings_no_wrong_byte(tmp_path: Path, kills: int) -> None:
    tally = KillTally()
    kill_run(tmp_path, kills, 1, tally)
    assert tally.problems == []
    assert tally.bad == 0
    assert tally.kills == kills
    assert tally.pages_loaded > 50
    assert tally.promised > 20


def test_memory_is_no_file_system_for_kills(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        pytest.raises(SystemExit),
        mock.patch("sys.argv", ["crash", "--cuts", "0", "--folder", "/dev/shm"]),
    ):
        main()
    assert "/dev/shm is memory (tmpfs)" in capsys.readouterr().err
