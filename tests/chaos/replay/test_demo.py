"""The demo, whole: it keeps its promises, and an interrupted one leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]


def start(out: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "demo", "--once", "--seconds", "24", "--out", str(out)],
        env=os.environ | {"PYTHONPATH": str(ROOT / "tools"), "COLUMNS": "160"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def left_behind(pid: int) -> list[str]:
    name = f"kvtier-demo-{pid}"
    found = [str(p) for top in ("/dev/shm", "/tmp") for p in Path(top).glob(f"{name}*")]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if name.encode() in (entry / "cmdline").read_bytes():
                    found.append(f"process {entry.name}")
            except OSError:
                continue
    return found


def test_the_demo_keeps_its_promises(tmp_path: Path) -> None:
    demo = start(tmp_path)
    said, _ = demo.communicate(timeout=380)
    assert demo.returncode == 0, said
    assert "BROKEN" not in said
    assert " 0 wrong bytes" in said
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert left_behind(demo.pid) == []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_ended_demo_leaves_nothing_behind(tmp_path: Path, how: signal.Signals) -> None:
    demo = start(tmp_path)
    assert demo.stdout is not None
    for line in demo.stdout:
        if "traffic has begun" in line:
            break
    else:
        pytest.fail(f"the demo ended with {demo.wait()} before its traffic began")
    demo.send_signal(how)
    demo.communicate(timeout=60)
    assert demo.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL)
    end = time.monotonic() + 30
    while left_behind(demo.pid) and time.monotonic() < end:
        time.sleep(0.1)
    assert left_behind(demo.pid) == []
