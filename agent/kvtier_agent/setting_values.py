"""Values that settings are given as text, NAME=DIR and the like: parsed once, with what to write
instead."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_NAME = re.compile(r"\A[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\Z")


@dataclass(frozen=True, slots=True)
class VolumeMapping:
    """One ``--volume name=DIR``: the policy's name for it, and where it is on this machine."""

    name: str
    path: Path

    @classmethod
    def parse(cls, text: str) -> VolumeMapping:
        name, sign, path = text.partition("=")
        if not sign or not path or not _NAME.match(name):
            raise ValueError(f"{text!r} is no volume; write name=DIR, as in data0=/mnt/data0")
        if not path.startswith("/"):
            path = str(Path.cwd() / path)
        return cls(name, Path(path))

    def __str__(self) -> str:
        return f"{self.name}={self.path}"


def one_folder(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # not there, or not yet: the names have to tell
        return os.path.normpath(one) == os.path.normpath(other)


LARGEST_GID: Final = (1 << 32) - 2
"""The kernel's own bound; the number above it stands for "no group"."""


@dataclass(frozen=True, slots=True)
class Domain:
    """One trust domain: its name is its socket's name; ``gid`` owns socket and arena."""

    name: str
    gid: int | None = None

    @classmethod
    def parse(cls, text: str) -> Domain:
        name, sign, gid = text.partition(":")
        if not _NAME.match(name) or (sign and not (gid.isdigit() and int(gid) <= LARGEST_GID)):
            raise ValueError(f"{text!r} is no domain; write NAME or NAME:GID, as in search:2000")
        return cls(name, int(gid) if sign else None)

    def __str__(self) -> str:
        return self.name if self.gid is None else f"{self.name}:{self.gid}"


@dataclass(frozen=True, slots=True)
class HttpAddress:
    """Where ``/healthz``, ``/readyz`` and ``/metrics`` are served. Port 0 takes a free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> HttpAddress:
        host, sign, port = text.rpartition(":")
        if not sign or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"{text!r} is no address; write HOST:PORT, as in 127.0.0.1:9476")
        return cls(host.strip("[]") or "0.0.0.0", int(port))  # noqa: S104 - ":9476" asks for it

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
