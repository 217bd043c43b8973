"""A `kvtier agent` process in folders of its own, for tests: started, asked, ended for good.

with AgentProcess(tmp_path, policy="...") as agent:
    agent.ready()
    Client(agent.socket, geometry)
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["AgentProcess"]


class AgentProcess:
    """``policy``: the text of a policy file (runs alone), or None with ``node_name`` and
    ``kubeconfig`` among ``options``. The folders stay over `stop` and `start`."""

    def __init__(self, root: Path, *options: str, policy: str | None = None) -> None:
        self.root = root
        self.policy_file = root / "policy.yaml"
        self.volume = root / "data0"
        self.volume.mkdir(parents=True, exist_ok=True)
        # Sockets want short paths, which a test's own folder is not.
        self.short = Path(tempfile.mkdtemp(prefix="kvt-"))
        self.socket = self.short / "default.sock"
        self.log = root / "agent.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.http = ""
        if policy is not None:
            self.write_policy(policy)
            options = ("--policy", str(self.policy_file), *options)
        self._options: Sequence[str] = options

    def write_policy(self, text: str) -> None:
        """Replaces the policy file as an editor does: whole."""
        new = self.policy_file.with_suffix(".new")
        new.write_text(text)
        new.replace(self.policy_file)

    def start(self) -> Self:
        """Starts the process; returns before it is ready."""
        environment = {k: v for k, v in os.environ.items() if k != "NODE_NAME"}
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "kvtier_cli.main", "agent"),
                    *("--run-dir", str(self.short), "--state-dir", str(self.root / "state")),
                    *("--volume", f"data0={self.volume}", "--allow-root-filesystem"),
                    *("--http", "127.0.0.1:0", "--device", "cpu", "--poll-seconds", "0.2"),
                    *("--look-seconds", "0.5", "--save-seconds", "0.5"),
                    *self._options,
                ],
                stdout=log,
                stderr=log,
                env=environment,
            )
        self.http = ""
        return self

    def ready(self, timeout: float = 60.0) -> Self:
        """Waits until the process says it has started. AssertionError with its log otherwise."""
        started = self.until(lambda: self._line("agent started"), "the agent starts", timeout)
        self.http = f"http://{started['http']}"
        return self

    def until(self, condition: Any, what: str, timeout: float = 30.0) -> Any:
        """The first true value of ``condition``; the log is shown when there is none in time."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            found = condition()
            if found:
                return found
            assert self.process is not None
            assert self.process.poll() is None, f"the agent ended: {self.tail()}"
            time.sleep(0.05)
        raise AssertionError(f"not within {timeout:g} s: {what}\n{self.tail()}")

    def get(self, path: str) -> tuple[int, str]:
        """HTTP status and body."""
        try:
            with urllib.request.urlopen(f"{self.http}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def status(self) -> dict[str, Any]:
        """The node status as the agent shows it in its run folder; empty before the first."""
        try:
            shown: dict[str, Any] = json.loads((self.short / "status.json").read_text())
        except (OSError, ValueError):
            return {}
        return shown

    def condition(self, type_: str) -> tuple[str, str, str]:
        """(status, reason, message) of a condition."""
        for c in self.status().get("conditions", []):
            if c["type"] == type_:
                return c["status"], c["reason"], c.get("message", "")
        return "", "", ""

    def lines(self) -> list[dict[str, Any]]:
        """Log lines since the last start."""
        found = []
        for line in self.log.read_bytes()[self._log_start :].splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found

    def _line(self, event: str) -> dict[str, Any] | None:
        return next((x for x in self.lines() if x.get("event") == event), None)

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Sends a signal and waits for the end; the exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(30)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)
        shutil.rmtree(self.short, ignore_errors=True)
        self._sweep_shared_memory()

    def _sweep_shared_memory(self) -> None:
        """What a killed agent leaves for its successor."""
        from kvtier_agent.node.places import arena_folder

        shutil.rmtree(arena_folder(Path("/dev/shm"), self.short), ignore_errors=True)
