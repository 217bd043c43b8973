"""An agent of a run's own (a replay, a benchmark): started for it, gone after it with its folders.

It is the real `kvtier agent` in a process of its own, alone under a policy file. Sockets, state
and logs are in a folder of shared memory (socket paths must be short), arenas beside them, volumes
under the temporary folder or where the user maps them; there a folder of the run's own is made
and removed, so that nothing of the user's is touched. The `guardian` sees to the removing.
"""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from kvtier_agent.replay.errors import ReplayError
from kvtier_agent.replay.guardian import Guardian, GuardianError
from kvtier_agent.server.connection import is_live

START_SECONDS = 60.0
"""How long an agent may take until its socket answers."""
STATUS_SECONDS = 30.0
"""How long it may take until the agent's status is on disk; it writes it twice a second."""
_POLL_SECONDS = 0.01

_SHM = Path("/dev/shm")  # noqa: S108 - it is where shared memory is
_DOMAIN = "default"


class OwnAgent:
    """A running agent; use as a context manager.

    Args:
        command: the words that start `kvtier agent`.
        policy: the KVTierPolicy object it runs under.
        volumes: volume name -> folder on this machine; those that the policy names and that
            are not here get a temporary one.
        seed: names the run's folders.
        arguments: further arguments of the agent.
        purpose: what the run is, for the names of its folders.

    Raises:
        ReplayError: the agent cannot start; with its own last words.
    """

    def __init__(
        self,
        command: Sequence[str],
        policy: Mapping[str, Any],
        *,
        volumes: Mapping[str, Path],
        seed: int,
        arguments: Sequence[str] = (),
        purpose: str = "replay",
    ) -> None:
        name = f"kvtier-{purpose}-{os.getpid()}-{seed:x}"
        shared = (_SHM if os.access(_SHM, os.W_OK) else Path(tempfile.gettempdir())) / name
        temporary = Path(tempfile.gettempdir()) / name
        self.volumes = {
            volume: (volumes[volume] / name if volume in volumes else temporary / volume)
            for volume in _volume_names(policy)
        }
        self.folder = shared
        """Of the run: socket, arenas, logs; in shared memory, removed at the end."""
        self._log = shared / "agent.log"
        self.socket = shared / "run" / f"{_DOMAIN}.sock"
        self._stack = ExitStack()
        try:
            for folder in volumes.values():
                if not folder.is_dir():
                    raise ReplayError(f"--volume: {folder} is no folder; make it first")
            folders = [shared, *self.volumes.values(), *([temporary] if self.volumes else [])]
            self.guardian = self._stack.enter_context(_guardian(_outermost(folders)))
            for folder in (shared / "run", shared / "arenas", *self.volumes.values()):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            policy_file = shared / "policy.yaml"
            policy_file.write_text(yaml.safe_dump(dict(policy)))
            self._argv = [
                *command,
                *("--policy", str(policy_file)),
                *("--run-dir", str(shared / "run")),
                *("--shm-dir", str(shared / "arenas")),
                *("--state-dir", str(shared / "state")),
                *("--http", "127.0.0.1:0"),
                *("--domain", _DOMAIN),
                "--allow-root-filesystem",
            ]
            for volume, folder in self.volumes.items():
                self._argv += ["--volume", f"{volume}={folder}"]
            self._argv += arguments
            self.start()
        except BaseException:
            self._stack.close()
            raise

    def start(self) -> None:
        """Start the agent (again, after `kill`) and wait until its socket answers. ReplayError."""
        self.pid = self.guardian.start("agent", self._argv, log=self._log, env=_environment())
        self._wait()

    def kill(self) -> None:
        """End the agent without warning (SIGKILL). Its folders stay."""
        os.kill(self.pid, signal.SIGKILL)
        self.guardian.stop("agent")

    def alive(self) -> str:
        """Why the agent is gone, "" while it runs."""
        try:
            status = self.guardian.poll("agent")
        except GuardianError as error:
            return str(error)
        return "" if status is None else f"the agent ended with status {status}: {self._words()}"

    def tiers(self) -> tuple[dict[str, int], str]:
        """Bytes of each tier that the agent has now, by the policy's names, and its word on those
        that got less than the policy asks for ("": none did). Raises ReplayError."""
        end = time.monotonic() + STATUS_SECONDS
        while True:
            try:
                status = json.loads((self.socket.parent / "status.json").read_text())
            except (OSError, ValueError):
                status = {}
            # What it says before a policy is in force says nothing.
            if status.get("revision"):
                break
            if time.monotonic() > end:
                raise ReplayError(self.alive() or "the agent has written no status")
            time.sleep(_POLL_SECONDS)
        sizes = {str(tier["name"]): int(tier["capacityBytes"]) for tier in status["tiers"]}
        words = [
            str(condition["message"])
            for condition in status["conditions"]
            if condition["type"] == "Clamped" and condition["status"] == "True"
        ]
        return sizes, "; ".join(words)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> OwnAgent:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _wait(self) -> None:
        end = time.monotonic() + START_SECONDS
        while not (self.socket.exists() and is_live(self.socket)):
            gone = self.alive()
            if gone:
                raise ReplayError(gone)
            if time.monotonic() > end:
                raise ReplayError(
                    f"the agent did not listen within {START_SECONDS:.0f} s: {self._words()}"
                )
            time.sleep(_POLL_SECONDS)

    def _words(self) -> str:
        """The last thing the agent said, in one line."""
        try:
            lines = self._log.read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return re.sub(r"\s+", " ", lines[-1])[:500] if lines else "it said nothing"


def _guardian(folders: Sequence[Path]) -> Guardian:
    try:
        return Guardian(folders)
    except GuardianError as error:
        raise ReplayError(f"cannot make the run's folders: {error}") from None


def _outermost(folders: Sequence[Path]) -> list[Path]:
    """Those that are in none of the others."""
    return [one for one in folders if not any(one.is_relative_to(o) for o in folders if o != one)]


def _volume_names(policy: Mapping[str, Any]) -> list[str]:
    nvme = (policy.get("spec") or {}).get("tiers", {}).get("nvme") or {}
    return [str(name) for name in nvme.get("volumes") or ()]


def _environment() -> dict[str, str]:
    """The user's environment without what would steer the agent elsewhere."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("KVTIER_AGENT_") and name != "NODE_NAME"
    }
    return kept | {"PYTHONUNBUFFERED": "1"}
