"""Who may talk to the API server: certificates from our own authority, kubeconfigs around them."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any


class Credentials:
    """The authority of one control plane, in the folder ``folder`` (made if it is empty).

    ``pki`` is the program from ``modules/pki``. Users are whoever a certificate names: the API
    server takes the common name for the user and the organizations for the groups, and RBAC
    decides what they may do.
    """

    def __init__(self, folder: Path, pki: Path) -> None:
        self.folder = folder
        self._pki = pki
        if not (folder / "sa.pub").exists():
            self._run("init", folder)

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def client(self, user: str, groups: tuple[str, ...]) -> tuple[Path, Path]:
        """Certificate and key of a user; the same user gets the same ones again."""
        file = "client-" + _digest(user, *groups)
        certificate, key = self / f"{file}.crt", self / f"{file}.key"
        if not certificate.exists():
            self._run("client", self.folder, file, user, *groups)
        return certificate, key

    def _run(self, *arguments: str | Path) -> None:
        subprocess.run([self._pki, *arguments], check=True, stdin=subprocess.DEVNULL)


def certificate_user(certificate: Path, key: Path) -> dict[str, str]:
    """The ``user`` part of a kubeconfig for a client certificate."""
    return {"client-certificate-data": _encoded(certificate), "client-key-data": _encoded(key)}


def write_kubeconfig(path: Path, *, server: str, authority: Path, user: dict[str, str]) -> Path:
    """Write a self-contained kubeconfig with mode 0600, as JSON, which every YAML parser reads."""
    name = "kvtier"
    config: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": name,
                "cluster": {"server": server, "certificate-authority-data": _encoded(authority)},
            }
        ],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        "current-context": name,
    }
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as handle:
        json.dump(config, handle, indent=1)
    scratch.replace(path)
    return path


def file_name(*parts: str) -> str:
    """A readable file name that no two lists of parts share."""
    readable = "".join(c if c.isalnum() else "-" for c in parts[0])[:40].strip("-")
    return f"{readable}-{_digest(*parts)}"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
