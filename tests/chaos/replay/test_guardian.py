"""What the guardian started, and its folders, are gone when its user is, however that one ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kvtier_agent.replay.guardian import Guardian, GuardianError
from leftovers import eventually

USER = """
import sys, time
from pathlib import Path
from kvtier_agent.replay.guardian import Guardian
root = Path(sys.argv[1])
guardian = Guardian([root])
(root / "file").write_text("x")
argv = [sys.executable, "-c", sys.argv[2]]
print(guardian.start("sleeper", argv, log=root / "log"), guardian._child.pid, flush=True)
time.sleep(60)
"""
POLITE = "import time; time.sleep(60)"


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_all_is_gone_after_the_user_was_ended(tmp_path: Path, how: signal.Signals) -> None:
    root = tmp_path / "root"
    user = subprocess.Popen(
        [sys.executable, "-c", USER, str(root), POLITE],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert user.stdout is not None
    pid, guardian = (int(word) for word in user.stdout.readline().split())
    assert (root / "file").exists()
    user.send_signal(how)
    user.wait(10)
    user.stdout.close()
    assert eventually(lambda: gone(pid) and gone(guardian) and not root.exists())


def test_children_die_with_a_killed_guardian(tmp_path: Path) -> None:
    guardian = Guardian([tmp_path / "root"])
    pid = guardian.start("sleeper", [sys.executable, "-c", POLITE], log=tmp_path / "log")
    os.kill(guardian._child.pid, signal.SIGKILL)
    assert eventually(lambda: gone(pid))
    with pytest.raises(GuardianError):
        guardian.poll("sleeper")
    guardian.close()


def test_ends_are_seen_and_outputs_kept(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Guardian() as guardian:
        guardian.start("three", [sys.executable, "-c", "print('words'); exit(3)"], log=log)
        assert eventually(lambda: guardian.poll("three") == 3)
        guardian.start("sleeper", [sys.executable, "-c", POLITE], log=log)
        assert guardian.poll("sleeper") is None
        assert guardian.stop("sleeper") == -signal.SIGTERM
    assert log.read_text() == "words\n"


def test_what_cannot_be_started_is_said(tmp_path: Path) -> None:
    with Guardian() as guardian:
        with pytest.raises(GuardianError, match="FileNotFoundError"):
            guardian.start("absent", [str(tmp_path / "absent")], log=tmp_path / "log")
        with pytest.raises(GuardianError, match="FileExistsError"):
            Guardian([tmp_path])
    guardian.close()
    with pytest.raises(GuardianError, match="closed"):
        guardian.poll("absent")
