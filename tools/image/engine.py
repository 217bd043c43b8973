"""docker or podman: which one there is, and how it is called on this machine.

`KVTIER_CONTAINER_TOOL` chooses one. Otherwise podman is taken before docker, because it needs no
daemon, and a docker whose daemon does not answer counts as none. Where there is neither, a root
user on Debian gets Debian's podman, runc and debootstrap installed.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

__all__ = ["Engine", "ImageError", "find_engine", "install_packages", "say"]

PACKAGES = ("podman", "runc")
_MOST_FILES, _MOST_PROCESSES = 20_000, 20_000
"""A container engine asks for limits that a machine which is itself a container may not grant."""


class ImageError(Exception):
    """One line that says what is wrong and what to do."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Engine:
    """How to call a container engine. `flags` go before the command, `limits` to build and run."""

    kind: Literal["podman", "docker"]
    program: str
    flags: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()

    def command(self, verb: str, *arguments: str) -> list[str]:
        limits = self.limits if verb in ("build", "run") else ()
        return [self.program, *self.flags, verb, *limits, *arguments]

    def run(
        self,
        verb: str,
        *arguments: str,
        timeout: float = 120,
        stdin: IO[bytes] | None = None,
        text_in: str | None = None,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Runs one command and gives what it said; ImageError with its last words when it fails."""
        command = self.command(verb, *arguments)
        try:
            done = subprocess.run(
                command,
                stdin=stdin if text_in is None else None,
                input=text_in,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ImageError(f"{self.kind} {verb} did not end within {timeout:.0f} s") from None
        if check and done.returncode != 0:
            last = "\n".join((done.stderr or done.stdout).strip().splitlines()[-15:])
            raise ImageError(f"{self.kind} {verb} failed (exit {done.returncode}):\n{last}")
        return done

    def has_image(self, reference: str) -> bool:
        return self.run("image", "inspect", reference, check=False).returncode == 0

    def inspect(self, reference: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run("image", "inspect", reference).stdout)[0]
        return found


def podman_flags(
    *, crun: bool, systemd: bool, files: int, processes: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(flags, limits) of podman: runc where crun is missing, cgroupfs where no systemd runs, and
    limits no higher than what this process may set itself. -1 means unlimited."""
    flags = (
        *(() if crun else ("--runtime=runc",)),
        *(() if systemd else ("--cgroup-manager=cgroupfs",)),
    )
    most_files = _MOST_FILES if files < 0 else min(files, _MOST_FILES)
    most_processes = _MOST_PROCESSES if processes < 0 else min(processes, _MOST_PROCESSES)
    limits = (
        f"--ulimit=nofile={min(1024, most_files)}:{most_files}",
        f"--ulimit=nproc={most_processes}:{most_processes}",
    )
    return flags, limits


def _podman(program: str) -> Engine:
    flags, limits = podman_flags(
        crun=shutil.which("crun") is not None,
        systemd=Path("/run/systemd/system").is_dir(),
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        processes=resource.getrlimit(resource.RLIMIT_NPROC)[1],
    )
    return Engine("podman", program, flags, limits)


def _answers(program: str) -> bool:
    """Whether there is a daemon (docker), or a usable storage (podman), behind the program."""
    try:
        done = subprocess.run([program, "info"], capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def find_engine(environ: Mapping[str, str] = os.environ) -> Engine:
    """The engine to use; installs Debian's podman where there is none and that is possible."""
    wanted = environ.get("KVTIER_CONTAINER_TOOL", "")
    if wanted not in ("", "docker", "podman"):
        raise ImageError(f"KVTIER_CONTAINER_TOOL is {wanted!r}; write docker or podman")
    if wanted:
        program = shutil.which(wanted)
        if program is None or not _answers(program):
            raise ImageError(f"KVTIER_CONTAINER_TOOL={wanted}, but `{wanted} info` does not answer")
        return _podman(program) if wanted == "podman" else Engine("docker", program)
    if (program := shutil.which("podman")) is not None:
        return _podman(program)
    if (program := shutil.which("docker")) is not None and _answers(program):
        return Engine("docker", program)
    install_packages(PACKAGES, "there is no podman and no docker daemon that answers")
    program = shutil.which("podman")
    if program is None:
        raise ImageError("podman was installed and is not on PATH")
    return _podman(program)


def install_packages(packages: Sequence[str], why: str) -> None:
    """apt-get install, where that is possible; otherwise an ImageError that names the packages."""
    names = " ".join(packages)
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise ImageError(f"{why}: install {names} (this can do it only as root on Debian)")
    say(f"image: {why}; installing Debian's {names}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for step in (("update", "-q"), ("install", "-q", "-y", "--no-install-recommends", *packages)):
        done = subprocess.run(
            ["apt-get", *step], capture_output=True, text=True, check=False, env=environment
        )
        if done.returncode != 0 and step[0] == "install":
            last = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
            raise ImageError(f"apt-get install {names} failed: {last[0]}")
