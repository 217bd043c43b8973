"""The tools: which Go module each comes from, and how to tell whether a given binary will do.

A tool is a folder under ``modules/`` whose ``go.mod`` pins the one version we use and whose
``go.sum`` pins every byte that goes into it. The version is read from there, so that moving to
another release is an edit of ``go.mod`` and nothing else.
"""

from __future__ import annotations

import hashlib
import platform
import re
from dataclasses import dataclass
from pathlib import Path

MODULES = Path(__file__).parent / "modules"


@dataclass(frozen=True)
class Tool:
    """One program.

    ``package`` is the import path of its main package, ``module`` the Go module whose version is
    the tool's (empty: the program's source lies in the module folder itself). ``stamps`` are the
    ``-X`` settings for the linker; in them ``{version}`` is ``v1.2.3``, ``{bare}`` ``1.2.3``,
    ``{major}`` and ``{minor}`` its parts. ``version_args`` make the program print its version
    (empty: it is never taken from anywhere but our own build). ``tags`` are build tags.
    """

    name: str
    package: str
    module: str = ""
    stamps: tuple[str, ...] = ()
    version_args: tuple[str, ...] = ()
    tags: str = ""

    @property
    def folder(self) -> Path:
        return MODULES / self.name

    @property
    def version(self) -> str:
        """The version in go.mod, such as ``v1.36.3``; ``v0`` for a program of our own."""
        if not self.module:
            return "v0"
        text = (self.folder / "go.mod").read_text()
        found = re.search(rf"^\s*(?:require )?{re.escape(self.module)} (v\S+)", text, re.M)
        if found is None:
            raise ValueError(f"{self.folder}/go.mod does not require {self.module}")
        return found[1]

    @property
    def program_version(self) -> str:
        """The version the program reports, without a ``v``."""
        bare = self.version.removeprefix("v")
        if self.name == "promtool":
            # Prometheus 3.15.1 is published as module v0.315.1: a Go module of major version 3
            # would need another import path.
            _, minor, patch = bare.split(".", 2)
            return f"{int(minor) // 100}.{int(minor) % 100}.{patch}"
        return bare

    @property
    def ldflags(self) -> str:
        bare = self.program_version
        major, minor, *_ = bare.split(".") if "." in bare else (bare, "0")
        values = {"version": f"v{bare}", "bare": bare, "major": major, "minor": minor}
        return " ".join(["-s -w", *(f"-X {stamp.format(**values)}" for stamp in self.stamps)])

    @property
    def _settings(self) -> list[str]:
        return [setting for setting in (self.ldflags, self.tags) if setting]

    def accepts(self, reported: str) -> bool:
        """Whether a program that printed ``reported`` when asked for its version will do.

        The same major and minor number is enough: patch releases do not change what is served.
        """
        found = re.search(r"\bv?(\d+\.\d+)\.\d+", reported)
        return found is not None and found[1] == ".".join(self.program_version.split(".")[:2])

    def fingerprint(self) -> str:
        """Changes with everything that the built binary depends on, save the Go compiler."""
        digest = hashlib.sha256()
        for path in sorted(self.folder.iterdir()):
            if path.suffix in {".go", ".mod", ".sum"}:
                digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
                digest.update(path.read_bytes())
        for part in (self.package, *self._settings, platform.system(), platform.machine()):
            digest.update(part.encode() + b"\0")
        return digest.hexdigest()[:12]


# `kubectl version` shows what component-base was stamped with; client-go's copy goes into the
# user agent, which is what the audit log names the controllers by.
_KUBE_STAMPS = tuple(
    f"k8s.io/{package}.{setting}"
    for package in ("component-base/version", "client-go/pkg/version")
    for setting in (
        "gitVersion={version}",
        "gitMajor={major}",
        "gitMinor={minor}",
        "gitTreeState=clean",
    )
)


def _kube(name: str) -> Tool:
    return Tool(
        name,
        package=f"k8s.io/kubernetes/cmd/{name}",
        module="k8s.io/kubernetes",
        stamps=_KUBE_STAMPS,
        version_args=("--version",),
    )


TOOLS: dict[str, Tool] = {
    tool.name: tool
    for tool in (
        Tool("pki", package="."),
        Tool(
            "etcd",
            package="go.etcd.io/etcd/server/v3",
            module="go.etcd.io/etcd/server/v3",
            version_args=("--version",),
        ),
        _kube("kube-apiserver"),
        _kube("kube-controller-manager"),
        _kube("kube-scheduler"),
        Tool(
            "helm",
            package="helm.sh/helm/v4/cmd/helm",
            module="helm.sh/helm/v4",
            stamps=("helm.sh/helm/v4/internal/version.version={version}",),
            version_args=("version", "--short"),
        ),
        Tool(
            "promtool",
            package="github.com/prometheus/prometheus/cmd/promtool",
            module="github.com/prometheus/prometheus",
            stamps=("github.com/prometheus/common/version.Version={bare}",),
            version_args=("--version",),
            # Rules are tested without the service discoveries, whose cloud SDKs are most of it.
            tags="remove_all_sd",
        ),
        Tool(
            "kwok",
            package="sigs.k8s.io/kwok/cmd/kwok",
            module="sigs.k8s.io/kwok",
            stamps=("sigs.k8s.io/kwok/pkg/consts.Version={bare}",),
            version_args=("--version",),
        ),
    )
}
