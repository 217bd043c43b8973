"""One supervised program, its log, and the ports that programs listen on."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_SUPERVISOR = Path(__file__).with_name("supervisor.py")

# Below the range that the kernel takes the ports of outgoing connections from (from 32768 on by
# default), so that while a server is down no connection can sit on its port by chance.
_PORTS = range(20000, 32000)


class Process:
    """A program under :mod:`controlplane.supervisor`; it ends when this process does.

    Its standard output and error are appended to ``log``. ``grace`` is how many seconds it has
    between SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        log: Path,
        cwd: Path,
        grace: float = 5.0,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self._grace = grace
        self._log_start = log.stat().st_size if log.exists() else 0
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", _SUPERVISOR, str(grace), *map(str, command)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                cwd=cwd,
                env=None if environ is None else dict(environ),
                start_new_session=True,
            )

    @property
    def supervisor_pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_status(self) -> int | None:
        """The program's exit status (128 + n for signal n), or None while it runs."""
        return self._process.poll()

    def ask_to_stop(self, *, kill: bool = False) -> None:
        """Ask for SIGTERM, and SIGKILL after the grace period; with ``kill``, for SIGKILL now."""
        pipe = self._process.stdin
        assert pipe is not None
        # The supervisor may be gone already; then there is nobody left to tell.
        with contextlib.suppress(BrokenPipeError):
            if kill and not pipe.closed:
                pipe.write(b"K")
                pipe.flush()
        with contextlib.suppress(BrokenPipeError):
            pipe.close()

    def wait(self) -> None:
        """Wait for the end of a program that has been asked to stop."""
        try:
            self._process.wait(self._grace + 5.0)
        except subprocess.TimeoutExpired:
            # The supervisor does not answer. The kernel ends the program with it.
            self._process.kill()
            self._process.wait()

    def said(self) -> str:
        """What this run of the program has written to its log."""
        with self.log.open("rb") as handle:
            handle.seek(self._log_start)
            return handle.read().decode(errors="replace")

    def lost_its_port(self) -> bool:
        """Whether it ended because something else listens on its port."""
        return not self.running and "address already in use" in self.said()


def free_port() -> int:
    """A loopback port that nothing listens on right now. Starting can still lose a race for it."""
    for port in random.sample(_PORTS, 200):
        with socket.socket() as probe:
            # As the servers do it: connections that are in TIME_WAIT are no obstacle.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise OSError(f"no free port between {_PORTS[0]} and {_PORTS[-1]}")


def alive(pid: int) -> bool:
    """Whether a process with this id exists (one that has ended unreaped counts as gone)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True
