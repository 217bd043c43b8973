"""Programs end with the process that started them, however that one ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from controlplane import ControlPlane
from controlplane.processes import Process, alive
from controlplane.testing import eventually

TOOLS = Path(__file__).parents[3] / "tools"

Programs = Callable[[Path], list[int]]


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(TOOLS)},
    )


START_SLEEPER = """
import sys, time
from pathlib import Path
from controlplane.processes import Process
folder = Path(sys.argv[1])
command = [sys.executable, "-c", sys.argv[2]]
process = Process("sleeper", command, log=folder / "log", cwd=folder, grace=1.0)
"""
SLEEP = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "programs"
    path.mkdir()
    return path


@pytest.fixture
def ended() -> Iterator[Callable[[subprocess.Popen[str]], subprocess.Popen[str]]]:
    """Ends a process after the test, if the test has not."""
    started: list[subprocess.Popen[str]] = []

    def add(process: subprocess.Popen[str]) -> subprocess.Popen[str]:
        started.append(process)
        return process

    yield add
    for process in started:
        process.kill()
        process.communicate()


Ended = Callable[[subprocess.Popen[str]], subprocess.Popen[str]]


def is_up(folder: Path) -> bool:
    return (folder / "log").exists() and "up" in (folder / "log").read_text()


def test_a_whole_control_plane_ends_when_its_owner_is_killed(
    tmp_path: Path, programs_in: Programs, ended: Ended, control_plane: ControlPlane
) -> None:
    # `control_plane` is asked for so that the tools are there; this one is another.
    root = tmp_path / "plane"
    owner = ended(
        subprocess.Popen(
            [
                *(sys.executable, "-m", "controlplane", "run", "--root", str(root)),
                *("--kubeconfig", str(tmp_path / "kubeconfig")),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(TOOLS)},
        )
    )
    assert owner.stdout is not None
    assert owner.stdout.readline().strip() == str(tmp_path / "kubeconfig")
    assert len(programs_in(root)) == 4  # Two programs, and a supervisor for each.

    owner.send_signal(signal.SIGKILL)
    owner.wait()

    eventually(lambda: not programs_in(root), what="etcd and kube-apiserver are gone", timeout=20)


def test_sigterm_ends_the_command_and_its_programs(
    tmp_path: Path, programs_in: Programs, ended: Ended, control_plane: ControlPlane
) -> None:
    root = tmp_path / "plane"
    owner = ended(
        subprocess.Popen(
            [sys.executable, "-m", "controlplane", "run", "--root", str(root)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(TOOLS)},
        )
    )
    assert owner.stdout is not None
    kubeconfig = Path(owner.stdout.readline().strip())
    assert kubeconfig.is_file()

    owner.terminate()

    assert owner.wait(timeout=30) == 130
    assert programs_in(root) == []


@pytest.mark.parametrize("program", [SLEEP, STUBBORN], ids=["obeys-sigterm", "ignores-sigterm"])
def test_killed_owner(folder: Path, programs_in: Programs, ended: Ended, program: str) -> None:
    owner = ended(python(f"{START_SLEEPER}\ntime.sleep(600)", str(folder), program))
    eventually(lambda: is_up(folder), what="the program runs")
    owner.kill()
    owner.wait()
    eventually(lambda: not programs_in(folder), what="the program is gone", timeout=20)


def test_killed_owner_whose_forked_child_still_holds_the_pipe(
    folder: Path, programs_in: Programs, ended: Ended
) -> None:
    code = f"""{START_SLEEPER}
import os
forked = os.fork()
if forked:
    print(forked, flush=True)
time.sleep(600)
"""
    owner = ended(python(code, str(folder), SLEEP))
    assert owner.stdout is not None
    forked = int(owner.stdout.readline())
    try:
        eventually(lambda: is_up(folder), what="the program runs")
        owner.kill()
        owner.wait()
        eventually(lambda: not programs_in(folder), what="the program is gone", timeout=20)
        assert alive(forked)
    finally:
        os.kill(forked, signal.SIGKILL)


def test_killed_supervisor(folder: Path, programs_in: Programs) -> None:
    process = Process("sleeper", [sys.executable, "-c", SLEEP], log=folder / "log", cwd=folder)
    eventually(lambda: is_up(folder), what="the program runs")
    os.kill(process.supervisor_pid, signal.SIGKILL)
    eventually(lambda: not programs_in(folder), what="the program is gone")
    process.wait()


def test_a_stubborn_program_is_killed_after_its_grace(folder: Path, programs_in: Programs) -> None:
    command = [sys.executable, "-c", STUBBORN]
    process = Process("stubborn", command, log=folder / "log", cwd=folder, grace=0.3)
    eventually(lambda: is_up(folder), what="the program runs")
    process.ask_to_stop()
    process.wait()
    assert process.exit_status == 128 + signal.SIGKILL
    assert programs_in(folder) == []


def test_exit_status_and_last_words_of_a_program_are_kept(folder: Path) -> None:
    (folder / "log").write_text("an earlier run\n")
    code = "import sys; print('last words'); sys.exit(3)"
    process = Process("brief", [sys.executable, "-c", code], log=folder / "log", cwd=folder)
    eventually(lambda: not process.running, what="it ends")
    assert process.exit_status == 3
    assert process.said() == "last words\n"
    assert not process.lost_its_port()
    process.ask_to_stop(kill=True)
    process.wait()


def test_a_program_that_does_not_exist(folder: Path) -> None:
    process = Process("none", [folder / "none"], log=folder / "log", cwd=folder)
    deadline = time.monotonic() + 10
    while process.running and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process.exit_status == 126
    assert "cannot start" in process.said()
    process.ask_to_stop()
