"""The native extension: built once for what it is made from, kept in the user's cache.

    python -m native install UV     into the environment of this Python; what `make setup` calls

`make image` asks `wheel` for it.

The wheel lies in ``$XDG_CACHE_HOME/kvtier/native/<fingerprint>/``, where the fingerprint covers the
sources, the lock file, the compiler and the processor. Where there is no cargo, or the build fails,
one line says so and the exit status is still 0: everything works without the extension, slower.
``KVTIER_NATIVE=0`` builds nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "native"
WITHOUT = "; kvtier works without the native extension, with more of the processor"


class NotBuiltError(Exception):
    """There is no wheel to be had; one line says why."""


def fingerprint(compiler: str) -> str:
    """A hash of everything that the wheel is made from."""
    parts = hashlib.sha256(f"{compiler}\n{platform.machine()}".encode())
    named = ("Cargo.toml", "Cargo.lock", "pyproject.toml")
    for path in [*(SOURCE / name for name in named), *sorted(SOURCE.glob("src/**/*.rs"))]:
        parts.update(f"\n{path.relative_to(SOURCE)}\n".encode())
        parts.update(path.read_bytes())
    return parts.hexdigest()[:16]


def cache_root() -> Path:
    """Of the user and not of a checkout."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if base.startswith("/") else Path.home() / ".cache"
    return root / "kvtier" / "native"


def wheel() -> Path:
    """The wheel, built if the cache does not hold it. Raises `NotBuiltError`."""
    if os.environ.get("KVTIER_NATIVE", "1") == "0":
        raise NotBuiltError("KVTIER_NATIVE=0: not built")
    cargo, maturin = shutil.which("cargo"), Path(sysconfig.get_path("scripts")) / "maturin"
    if cargo is None:
        raise NotBuiltError("there is no cargo on PATH (https://rustup.rs)")
    if not maturin.exists():
        raise NotBuiltError("there is no maturin in this environment; run make setup")
    asked = subprocess.run(["rustc", "-Vv"], cwd=SOURCE, capture_output=True, text=True)
    if asked.returncode != 0:
        raise NotBuiltError(f"rustc does not run: {_last(asked.stderr)}")
    folder = cache_root() / fingerprint(asked.stdout)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            _build(maturin, folder)
    return next(folder.glob("*.whl"))


def _build(maturin: Path, folder: Path) -> None:
    """Puts the wheel into `folder`, which takes its name only when it is complete."""
    began = time.monotonic()
    print("native: building the extension (a minute)", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".build-") as made:
        out = Path(made) / "out"
        done = subprocess.run(
            [maturin, "build", "--release", "--locked", "--out", out, "--interpreter",
             sys.executable, "--manifest-path", SOURCE / "Cargo.toml"],
            env={**os.environ, "CARGO_TARGET_DIR": str(Path(made) / "target")},
            capture_output=True,
            text=True,
        )  # fmt: skip
        if done.returncode != 0:
            log = folder.parent / "build.log"
            log.write_text(done.stdout + done.stderr)
            raise NotBuiltError(f"the build failed ({_last(done.stderr)}), all of it is in {log}")
        out.rename(folder)
    print(f"native: built in {time.monotonic() - began:.0f} s", file=sys.stderr)


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1].strip()


def install(uv: Path) -> None:
    """The wheel into this environment, unless it is what is there already."""
    built = wheel()
    mark = Path(sysconfig.get_path("purelib")) / ".kvtier-native"
    name = built.parent.name
    present = Path(sysconfig.get_path("platlib"), "kvtier_native").is_dir()
    if present and mark.is_file() and mark.read_text() == name:
        return
    subprocess.run(
        [uv, "pip", "install", "--quiet", "--python", sys.executable, "--no-deps", "--offline",
         "--reinstall", built],
        check=True,
    )  # fmt: skip
    mark.write_text(name)


def main(arguments: list[str]) -> int:
    try:
        match arguments:
            case ["install", uv]:
                install(Path(uv))
            case _:
                print("usage: python -m native install UV", file=sys.stderr)
                return 2
    except NotBuiltError as error:
        print(f"native: {error}{WITHOUT}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
