"""Processes and folders that end with the process that asked for them, however that one ends.

A replay starts an agent with folders on disk and in shared memory. When the replay is killed, no
handler of its own runs, so somebody else must clean up: the *guardian*, a small child process in a
session of its own (Ctrl-C does not reach it). It starts what it is told to start, and reads its
orders from a pipe. When the pipe ends, by `close()` or because the other side is dead, it ends
everything it started (SIGTERM, ten seconds, SIGKILL) and removes its folders. If the guardian
itself is killed, the kernel kills its children (PR_SET_PDEATHSIG).

Orders and answers are JSON lines, one answer for each order, in order. This file is also the
child's program: it uses the standard library alone and starts in a few milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

GRACE_SECONDS = 10.0
"""How long a process has between SIGTERM and SIGKILL."""

_PR_SET_PDEATHSIG = 1


class GuardianError(Exception):
    """The guardian could not do what it was told; the text says why."""


class Guardian:
    """Starts processes that cannot outlive the caller.

    Args:
        folders: made at once with mode 0700 (they must not be there yet), removed at the end.
    """

    def __init__(self, folders: Sequence[Path] = ()) -> None:
        self._lock = threading.Lock()
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._order({"folders": [str(folder) for folder in folders]})

    def __enter__(self) -> Guardian:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(
        self, name: str, argv: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None
    ) -> int:
        """Start a process with both outputs appended to `log`; returns its process id."""
        order = {
            "start": name,
            "argv": list(argv),
            "log": str(log),
            "env": None if env is None else dict(env),
        }
        return int(self._order(order)["pid"])

    def poll(self, name: str) -> int | None:
        """The exit status of a process, None while it runs."""
        status: int | None = self._order({"poll": name})["status"]
        return status

    def stop(self, name: str) -> int:
        """End one process and wait for it; returns its exit status."""
        return int(self._order({"stop": name})["status"])

    def close(self) -> None:
        """End everything and remove the folders; may be called twice."""
        with self._lock, contextlib.suppress(OSError):
            if self._child.stdin is not None:
                self._child.stdin.close()
        self._child.wait()

    def _order(self, order: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            stdin, stdout = self._child.stdin, self._child.stdout
            if stdin is None or stdout is None or stdin.closed:
                raise GuardianError("the guardian is closed")
            try:
                stdin.write(json.dumps(order).encode() + b"\n")
                stdin.flush()
                line = stdout.readline()
            except OSError as error:
                raise GuardianError(f"the guardian is gone: {error}") from None
        if not line:
            raise GuardianError("the guardian ended unexpectedly")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise GuardianError(str(answer["error"]))
        return answer


class _Child:
    """The guardian process itself."""

    def __init__(self) -> None:
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.folders: list[Path] = []
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._pid = os.getpid()

    def run(self) -> None:
        try:
            for line in sys.stdin.buffer:
                try:
                    answer = self._obey(json.loads(line))
                except (OSError, ValueError, KeyError) as error:
                    answer = {"error": f"{type(error).__name__}: {error}"}
                sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
                sys.stdout.buffer.flush()
        except OSError:
            pass  # nobody is left to read the answer: the end, like an end of orders
        finally:
            self._end()

    def _obey(self, order: dict[str, Any]) -> dict[str, Any]:
        if "folders" in order:
            for name in order["folders"]:
                folder = Path(name)
                folder.mkdir(mode=0o700, parents=True)
                self.folders.append(folder)
            return {}
        if "start" in order:
            with Path(order["log"]).open("ab") as log:
                process = subprocess.Popen(
                    order["argv"],
                    env=order["env"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    # One thread only here, so the parent of this signal is the process itself.
                    preexec_fn=self._die_with_parent,
                )
            self.processes[order["start"]] = process
            return {"pid": process.pid}
        if "poll" in order:
            return {"status": self.processes[order["poll"]].poll()}
        return {"status": self._stop(self.processes[order["stop"]])}

    def _die_with_parent(self) -> None:
        self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self._pid:
            os._exit(127)  # the guardian ended before the request was made

    def _stop(self, process: subprocess.Popen[bytes]) -> int:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
        return process.wait()

    def _end(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            self._stop(process)
        for folder in reversed(self.folders):
            for _ in range(20):
                shutil.rmtree(folder, ignore_errors=True)
                if not folder.exists():
                    break
                time.sleep(0.1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    _Child().run()
