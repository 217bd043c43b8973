"""An environment of its own for each peer, in the user's cache: made once, then used again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

UV = Path(__file__).resolve().parent.parent.parent / ".tools" / "bin" / "uv"


class PeerError(Exception):
    """A peer cannot be run; one line that says why and what to do."""


def folder(name: str) -> Path:
    """Where the environment of this name is kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "kvtier" / "peers" / name


def ensure(name: str, packages: tuple[str, ...], probe: str) -> Path:
    """The `bin` folder of an environment with these packages; installed where `probe` (a program)
    is not there yet. Raises `PeerError`."""
    home = folder(name)
    if not (home / "bin" / probe).exists():
        print(f"installing {' '.join(packages)} into {home} (gigabytes, once)", file=sys.stderr)
        uv = str(UV) if UV.exists() else shutil.which("uv")
        if uv is None:
            raise PeerError("uv is not there; run make setup first")
        python = str(home / "bin" / "python")
        for words in (
            [uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(home)],
            [uv, "pip", "install", "--quiet", "--python", python, *packages],
        ):
            if subprocess.run(words, stdout=sys.stderr).returncode:
                raise PeerError(f"cannot install {name}; the lines above say why")
    return home / "bin"
