"""Containers that run as the chart's Pods do: read-only root, no capability, the chart's seccomp
profile; gone at the end, and those of a check that was killed are gone at the next.
"""

from __future__ import annotations

import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from image.build import ROOT
from image.engine import Engine, ImageError

__all__ = ["Container", "Containers", "until"]

_LABEL = "kvtier-image-check"
SECCOMP = ROOT / "charts" / "kvtier" / "files" / "seccomp" / "agent-v1.json"

HARDENED = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges")


def until(
    condition: Callable[[], object], what: str, timeout: float, say_more: Callable[[], str]
) -> None:
    """Waits for a true value; ImageError with `say_more()` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise ImageError(f"not within {timeout:.0f} s: {what}\n{say_more()}")
        time.sleep(0.2)


class Container:
    """One that runs in the background."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self.name = name

    @property
    def running(self) -> bool:
        done = self._engine.run("inspect", "--format", "{{.State.Running}}", self.name, check=False)
        return done.stdout.strip() == "true"

    def logs(self, lines: int = 25) -> str:
        done = self._engine.run("logs", "--tail", str(lines), self.name, check=False)
        return f"-- {self.name} said:\n{done.stdout}{done.stderr}"

    def answers(self, url: str, timeout: float = 60) -> None:
        """Waits for a 200 from a path of its HTTP server."""

        def well() -> bool:
            if not self.running:
                raise ImageError(f"{self.name} ended\n{self.logs()}")
            try:
                with urllib.request.urlopen(url, timeout=5) as answer:
                    return bool(answer.status == 200)
            except (urllib.error.URLError, OSError):
                return False

        until(well, f"200 from {url}", timeout, self.logs)

    def execute(self, *command: str) -> str:
        return self._engine.run("exec", self.name, *command).stdout

    def stop(self) -> None:
        """SIGTERM, and an exit status of 0."""
        self._engine.run("stop", "--time=20", self.name)
        done = self._engine.run("inspect", "--format", "{{.State.ExitCode}}", self.name)
        if done.stdout.strip() != "0":
            raise ImageError(
                f"{self.name} ended with {done.stdout.strip()} at SIGTERM\n{self.logs()}"
            )


class Containers:
    """Starts them on the host's network, where the API server listens on the loopback."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._made: list[str] = []

    def __enter__(self) -> Self:
        self._sweep()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name in self._made:
            self._engine.run("rm", "--force", name, check=False)

    def start(self, role: str, image: str, *arguments: str, options: tuple[str, ...]) -> Container:
        name = f"kvtier-check-{os.getpid()}-{role}"
        self._made.append(name)
        self._engine.run(
            "run",
            *("--detach", "--name", name, "--label", f"{_LABEL}={os.getpid()}"),
            *("--network=host", *HARDENED, *options),
            *(image, *arguments),
        )
        return Container(self._engine, name)

    def once(self, image: str, *command: str, options: tuple[str, ...] = ()) -> str:
        """Runs a command in place of the image's own, and gives its standard output."""
        program, *arguments = command
        return self._engine.run(
            "run",
            *("--rm", "--network=none", *HARDENED, *options),
            *("--entrypoint", program, image, *arguments),
        ).stdout

    def _sweep(self) -> None:
        """Removes what a check left that can no longer do it itself."""
        listed = self._engine.run(
            *("ps", "--all", "--filter", f"label={_LABEL}"),
            *("--format", f'{{{{.Names}}}} {{{{index .Labels "{_LABEL}"}}}}'),
            check=False,
        )
        for line in listed.stdout.splitlines():
            name, _, owner = line.partition(" ")
            if owner.isdigit() and not Path(f"/proc/{owner}").exists():
                self._engine.run("rm", "--force", name, check=False)
