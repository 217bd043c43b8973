"""How images are built: what goes in, what must not, and with which flags."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from image.base import recipe_name
from image.build import build_environment, uv_cache
from image.engine import Engine, ImageError, find_engine, podman_flags

ROOT = Path(__file__).parents[3]
LOCKS = ("operator", "agent", "build")


def packages(lock: str) -> set[str]:
    text = (ROOT / "requirements" / f"{lock}.lock").read_text()
    return set(re.findall(r"^([a-z0-9][a-z0-9._-]*)==", text, flags=re.MULTILINE))


@pytest.mark.parametrize("lock", LOCKS)
def test_locks_name_no_index_and_hash_every_package(lock: str) -> None:
    text = (ROOT / "requirements" / f"{lock}.lock").read_text()
    assert "://" not in text
    assert "--index" not in text
    assert "--find-links" not in text
    entries = re.split(r"^(?=[a-z0-9][a-z0-9._-]*==)", text, flags=re.MULTILINE)[1:]
    assert len(entries) >= len(packages(lock)) >= 3
    for entry in entries:
        assert "--hash=sha256:" in entry, entry.splitlines()[0]


def test_the_operators_lock_has_nothing_of_the_agents() -> None:
    assert not packages("operator") & {"torch", "numpy", "pyzmq", "triton", "matplotlib"}
    assert "torch" in packages("agent")
    assert {"kopf", "kubernetes", "pydantic"} <= packages("operator")


def test_every_installation_in_the_dockerfile_checks_hashes() -> None:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    installations = re.findall(r"pip install[^&\n]*", text)
    assert len(installations) == 5
    for command in installations:
        assert "--require-hashes" in command or "--offline" in command, command
    assert re.findall(r"^USER (.*)$", text, flags=re.MULTILINE) == ["65532:65532"]
    assert "ARG BASE_IMAGE=python:3.11-slim" in text


def test_the_build_context_is_what_the_dockerfile_copies() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    allowed = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    recipe = (ROOT / "Dockerfile").read_text()
    used = set(re.findall(r"--mount=type=bind,source=([^,\s]+)", recipe))
    for line in recipe.splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            used.update(line.split()[1:-1])
    assert "*" in ignored
    covered = {path: {a for a in allowed if f"{path}/".startswith(f"{a}/")} for path in used}
    assert all(covered.values()), covered
    assert set().union(*covered.values()) == allowed


def test_settings_of_the_machine_reach_the_build_and_secrets_do_not(tmp_path: Path) -> None:
    bundle = tmp_path / "ca.crt"
    bundle.write_text("")
    environ = {
        "SSL_CERT_FILE": str(bundle),
        "HTTPS_PROXY": "http://proxy:3128",
        "PIP_INDEX_URL": "https://mirror/simple",
        "AWS_SECRET_ACCESS_KEY": "no",
    }
    variables, found = build_environment(environ, host_cache=True)
    assert found == bundle
    assert variables["SSL_CERT_FILE"] == "/run/secrets/build_ca"
    assert variables["HTTPS_PROXY"] == "http://proxy:3128"
    assert variables["PIP_INDEX_URL"] == "https://mirror/simple"
    assert variables["UV_CACHE_DIR"].startswith("/var/cache/")
    assert "AWS_SECRET_ACCESS_KEY" not in variables
    # A bundle that is not there is not promised.
    variables, found = build_environment({"SSL_CERT_FILE": "/nowhere/ca"}, host_cache=False)
    assert found is None
    assert variables == {}


def test_the_uv_cache_is_where_uv_has_it() -> None:
    assert uv_cache({"UV_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}) == Path("/a")
    assert uv_cache({"XDG_CACHE_HOME": "/b", "HOME": "/c"}) == Path("/b/uv")
    assert uv_cache({"HOME": "/c"}) == Path("/c/.cache/uv")


def test_podman_gets_the_flags_that_the_machine_needs() -> None:
    flags, limits = podman_flags(crun=False, systemd=False, files=20_000, processes=90_000)
    assert flags == ("--runtime=runc", "--cgroup-manager=cgroupfs")
    assert limits == ("--ulimit=nofile=1024:20000", "--ulimit=nproc=20000:20000")
    flags, limits = podman_flags(crun=True, systemd=True, files=-1, processes=512)
    assert flags == ()
    assert limits == ("--ulimit=nofile=1024:20000", "--ulimit=nproc=512:512")


def test_limits_go_to_what_starts_containers_only() -> None:
    engine = Engine("podman", "podman", ("--runtime=runc",), ("--ulimit=nproc=9:9",))
    assert engine.command("run", "x") == [
        "podman",
        "--runtime=runc",
        "run",
        "--ulimit=nproc=9:9",
        "x",
    ]
    assert engine.command("ps") == ["podman", "--runtime=runc", "ps"]


def test_an_unknown_engine_is_refused_with_what_to_write() -> None:
    with pytest.raises(
        ImageError, match="KVTIER_CONTAINER_TOOL is 'nerdctl'; write docker or podman"
    ):
        find_engine({"KVTIER_CONTAINER_TOOL": "nerdctl"})


def test_the_base_that_is_made_here_is_named_after_its_recipe() -> None:
    assert re.fullmatch(r"localhost/kvtier-base:bookworm-[0-9a-f]{10}", recipe_name())
