"""Small JSON documents that outlive the process: written whole, or not at all.

New bytes go to a temporary file beside the old one, are flushed, and take its place by rename; then
the folder is flushed. A power cut leaves the old document or the new one. A document that cannot be
read (torn by another tool, of a newer layout) is set aside under ``.bad`` and counts as absent,
with its reason: a damaged state file must not keep the cache from serving.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

__all__ = ["StateFile"]

MOST_BYTES: Final = 4 << 20


class StateFile:
    """One document of the given layout version. Owner only (0600). Not for several writers: the
    agent's lock on its folder keeps a second one out."""

    def __init__(self, path: Path, layout: int) -> None:
        self.path = path
        self._layout = layout

    def read(self) -> tuple[dict[str, Any] | None, str]:
        """The document, or None and why ("" where there simply is none)."""
        try:
            with self.path.open("rb") as file:
                text = file.read(MOST_BYTES + 1)
        except FileNotFoundError:
            return None, ""
        except OSError as e:
            return None, f"{self.path}: {e.strerror}"
        problem = f"{self.path}: not a state file of this version; set aside as {self._aside.name}"
        try:
            document = json.loads(text)
        except ValueError:
            document = None
        if (
            len(text) > MOST_BYTES
            or not isinstance(document, dict)
            or document.get("layout") != self._layout
        ):
            self._set_aside()
            return None, problem
        return document, ""

    def write(self, document: Mapping[str, Any]) -> None:
        """Replaces the document. Raises OSError; the old one is then still there."""
        text = json.dumps({"layout": self._layout, **document}, separators=(",", ":")).encode()
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @property
    def _aside(self) -> Path:
        return self.path.with_name(self.path.name + ".bad")

    def _set_aside(self) -> None:
        # Where even that fails, `read` has said so and the next write replaces the file.
        with contextlib.suppress(OSError):
            self.path.replace(self._aside)
