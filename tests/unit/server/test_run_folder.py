"""One agent per run folder; sockets with the right mode, and what happens to old ones."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from kvtier_agent.server.rundir import RunDir
from kvtier_agent.server.settings import ServerError, ServerSettings


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    one = zmq.Context()
    yield one
    one.destroy(linger=0)


def test_a_second_agent_on_the_folder_is_told_who_has_it(tmp_path: Path) -> None:
    first = RunDir(tmp_path)
    with pytest.raises(ServerError, match=rf"in use by another agent \(pid {os.getpid()}\)"):
        RunDir(tmp_path)
    first.close([])
    RunDir(tmp_path).close([])


def test_the_lock_goes_with_a_killed_agent(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from kvtier_agent.server.rundir import RunDir;"
        "r = RunDir(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ServerError, match="in use"):
            RunDir(tmp_path)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    RunDir(tmp_path).close([])


def test_sockets_are_for_the_owner_and_the_group(tmp_path: Path, context: zmq.Context) -> None:
    run_dir = RunDir(tmp_path)
    router = run_dir.message_socket(context, "search", None, ServerSettings(tmp_path))
    listener = run_dir.lifeline_socket("search", None)
    for name in ("search.sock", "search.life"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o660
    router.close(0)
    listener.close()
    run_dir.close(["search"])
    assert not list(tmp_path.glob("search*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a socket to another group needs root")
def test_a_socket_belongs_to_the_group_of_its_domain(tmp_path: Path, context: zmq.Context) -> None:
    run_dir = RunDir(tmp_path)
    router = run_dir.message_socket(context, "search", 4242, ServerSettings(tmp_path))
    assert (tmp_path / "search.sock").stat().st_gid == 4242
    router.close(0)
    run_dir.close([])


def test_a_dead_socket_is_replaced(tmp_path: Path, context: zmq.Context) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / "default.sock"))
    left.close()
    assert (tmp_path / "default.sock").is_socket()
    run_dir = RunDir(tmp_path)
    router = run_dir.message_socket(context, "default", None, ServerSettings(tmp_path))
    router.close(0)
    run_dir.close([])


def test_a_socket_that_somebody_listens_on_is_left_alone(
    tmp_path: Path, context: zmq.Context
) -> None:
    other = socket.socket(socket.AF_UNIX)
    other.bind(str(tmp_path / "default.sock"))
    other.listen()
    run_dir = RunDir(tmp_path)
    with pytest.raises(ServerError, match="is in use"):
        run_dir.message_socket(context, "default", None, ServerSettings(tmp_path))
    other.close()
    run_dir.close([])


def test_a_file_in_the_socket_s_place_is_not_removed(tmp_path: Path, context: zmq.Context) -> None:
    (tmp_path / "default.sock").write_text("mine")
    run_dir = RunDir(tmp_path)
    with pytest.raises(ServerError, match="is no socket"):
        run_dir.message_socket(context, "default", None, ServerSettings(tmp_path))
    assert (tmp_path / "default.sock").read_text() == "mine"
    run_dir.close([])


def test_a_path_too_long_for_a_socket_is_said(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    run_dir = RunDir(folder)
    with pytest.raises(ServerError, match="shorter folder"):
        run_dir.lifeline_socket("default", None)
    run_dir.close([])


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ServerError, match="--run-dir"):
        RunDir(tmp_path / "file" / "run")
