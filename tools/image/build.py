"""Runs the Dockerfile.

What this machine needs to reach its package index (certificates, mirrors, proxies) goes in as two
secrets: they exist while a step runs and are in no layer. With podman the user's uv cache is
mounted too, so that several GB of wheels that were unpacked here already are not fetched again.

The native extension is compiled on this machine, where there is a compiler, and handed over as a
wheel in ``native/wheels``; without one the agent's image has no extension, and a line says so.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import native
from image.engine import Engine, ImageError, say

__all__ = ["ROOT", "TARGETS", "Built", "build", "build_environment", "offer_native", "reference"]

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / "native" / "wheels"
TARGETS = ("operator", "agent")
_HOST_CACHE = "/var/cache/uv-host"
_CA = "/run/secrets/build_ca"

_PASSED = (
    "PIP_INDEX_URL",
    "PIP_EXTRA_INDEX_URL",
    "PIP_TRUSTED_HOST",
    "PIP_DEFAULT_TIMEOUT",
    "UV_INDEX_URL",
    "UV_DEFAULT_INDEX",
    "UV_INDEX",
    "UV_EXTRA_INDEX_URL",
    "UV_INSECURE_HOST",
    "UV_HTTP_TIMEOUT",
    "UV_SYSTEM_CERTS",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
)
_BUNDLES = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")


@dataclass(frozen=True, slots=True)
class Built:
    target: str
    reference: str
    size: int
    seconds: float


def reference(target: str, tag: str = "dev") -> str:
    return f"localhost/kvtier/{target}:{tag}"


def build_environment(
    environ: Mapping[str, str], *, host_cache: bool
) -> tuple[dict[str, str], Path | None]:
    """(variables for the build's steps, bundle of certificates or None)."""
    variables = {name: environ[name] for name in _PASSED if environ.get(name)}
    bundle = next((Path(environ[name]) for name in _BUNDLES if environ.get(name)), None)
    if bundle is not None and not bundle.is_file():
        bundle = None
    if bundle is not None:
        variables |= dict.fromkeys(_BUNDLES, _CA)
    if host_cache:
        variables["UV_CACHE_DIR"] = _HOST_CACHE
    return variables, bundle


def uv_cache(environ: Mapping[str, str]) -> Path:
    """The user's uv cache, by uv's own rules for where it is."""
    if given := environ.get("UV_CACHE_DIR"):
        return Path(given)
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path(environ.get("HOME", "/root")) / ".cache") / "uv"


def offer_native() -> None:
    """Puts the wheel of the native extension, if there is one, where the Dockerfile looks."""
    for old in WHEELS.glob("*.whl"):
        old.unlink()
    try:
        shutil.copy(native.wheel(), WHEELS)
    except native.NotBuiltError as error:
        say(f"image: the agent's image is built without the native extension: {error}")


def build(engine: Engine, base: str, target: str, *, tag: str = "dev") -> Built:
    """Builds one target and says how big it is. Unchanged layers are taken as they are."""
    began = time.monotonic()
    cache = uv_cache(os.environ)
    host_cache = engine.kind == "podman" and cache.is_dir()
    variables, bundle = build_environment(os.environ, host_cache=host_cache)
    name = reference(target, tag)
    if target == "agent":
        offer_native()
    with tempfile.TemporaryDirectory(prefix="kvtier-image-") as folder:
        env_file = Path(folder) / "build_env"
        env_file.touch(mode=0o600)
        env_file.write_text("".join(f"{k}={shlex.quote(v)}\n" for k, v in variables.items()))
        arguments = [
            "--network=host",
            f"--build-arg=BASE_IMAGE={base}",
            f"--secret=id=build_env,src={env_file}",
            *([f"--secret=id=build_ca,src={bundle}"] if bundle else []),
            *([f"--volume={cache}:{_HOST_CACHE}"] if host_cache else []),
            f"--target={target}",
            f"--tag={name}",
            str(ROOT),
        ]
        log = Path(folder) / "log"
        with log.open("w") as out:
            process = subprocess.Popen(
                engine.command("build", *arguments),
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "DOCKER_BUILDKIT": "1"},
            )
            while True:
                try:
                    status = process.wait(timeout=15)
                    break
                except subprocess.TimeoutExpired:
                    say(f"image: {target}: {time.monotonic() - began:.0f} s, {_last_line(log)}")
                except BaseException:
                    process.terminate()
                    raise
        if status != 0:
            last = "\n".join(log.read_text(errors="replace").strip().splitlines()[-25:])
            raise ImageError(f"building {target} failed (exit {status}):\n{last}")
    size = int(engine.inspect(name)["Size"])
    return Built(target, name, size, time.monotonic() - began)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:100] if lines else "starting"
