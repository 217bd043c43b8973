"""The base image: Python 3.11 or newer with venv, on a Debian.

In this order: the one that was asked for (`--base`, `KVTIER_BASE_IMAGE`); the Dockerfile's default
where it is here already or can be pulled; a Debian made by debootstrap, kept under a name that says
its recipe, so that it is made once. A registry that is not to be had answers within seconds or
never; it gets one try of half a minute.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from image.engine import Engine, ImageError, install_packages, say

__all__ = ["DEFAULT", "base_image"]

DEFAULT = "docker.io/library/python:3.11-slim"
RELEASE = "bookworm"
PACKAGES = ("python3", "python3-venv", "ca-certificates")
# What an image needs of neither the package manager nor the manuals.
_CLUTTER = (
    "var/cache/apt",
    "var/lib/apt/lists",
    "var/log",
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
)
_PULL_SECONDS = 30


def recipe_name() -> str:
    """The local name of the debootstrap image, from everything that it is made of."""
    recipe = "\n".join((RELEASE, *PACKAGES, *_CLUTTER))
    return f"localhost/kvtier-base:{RELEASE}-{hashlib.sha256(recipe.encode()).hexdigest()[:10]}"


def base_image(engine: Engine, asked: str = "", environ: Mapping[str, str] = os.environ) -> str:
    """A reference that the engine has, or can pull."""
    wanted = asked or environ.get("KVTIER_BASE_IMAGE", "")
    if wanted:
        return wanted
    if engine.has_image(DEFAULT):
        return DEFAULT
    made = recipe_name()
    if engine.has_image(made):
        return made
    try:
        if engine.run("pull", DEFAULT, timeout=_PULL_SECONDS, check=False).returncode == 0:
            return DEFAULT
    except ImageError:
        pass
    _bootstrap(engine, made)
    return made


def _bootstrap(engine: Engine, name: str) -> None:
    if os.geteuid() != 0:
        raise ImageError(
            f"{DEFAULT} cannot be pulled, and debootstrap, which would make a base image, needs "
            "root: run this as root, or name an image that you have with --base"
        )
    if shutil.which("debootstrap") is None:
        install_packages(("debootstrap",), f"{DEFAULT} cannot be pulled and debootstrap is missing")
    say(f"image: {DEFAULT} cannot be pulled; making a Debian {RELEASE} with debootstrap (a minute)")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvtier-base-") as folder:
        root = Path(folder) / "root"
        root.mkdir()
        done = subprocess.run(
            [
                "debootstrap",
                "--variant=minbase",
                f"--include={','.join(PACKAGES)}",
                RELEASE,
                str(root),
                *_mirror(),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            last = (done.stdout + done.stderr).strip().splitlines()[-1:] or ["no reason given"]
            raise ImageError(f"debootstrap failed: {last[0]}")
        for path in _CLUTTER:
            shutil.rmtree(root / path, ignore_errors=True)
            (root / path).mkdir(parents=True, exist_ok=True)
        archive = subprocess.Popen(
            ["tar", "-C", str(root), "--numeric-owner", "-c", "."], stdout=subprocess.PIPE
        )
        try:
            engine.run("import", "-", name, stdin=archive.stdout)
        finally:
            if archive.stdout is not None:
                archive.stdout.close()
            if archive.wait() != 0:
                raise ImageError("tar of the base image failed")
    say(f"image: base image ready after {time.monotonic() - began:.0f} s")


def _mirror() -> tuple[str, ...]:
    """Where this machine's apt takes that Debian from, if it does; debootstrap has a default."""
    asked = subprocess.run(
        [
            "apt-get",
            "indextargets",
            "--format",
            "$(REPO_URI)",
            "Created-By: Packages",
            f"Codename: {RELEASE}",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    found = asked.stdout.split()
    return (found[0],) if asked.returncode == 0 and found else ()
