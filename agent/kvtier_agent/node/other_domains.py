"""What trust domains left that this agent serves no more: gone from memory and volumes at start.

Nobody would ever read it, and it counts against no cap. Called with the locks on the run folder and
the arenas' folder held, so what lies there is nobody else's. A folder on a volume goes only if it
has a manifest of ours, no other agent holds its lock and no newer version wrote it; of its files
only those that are ours by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

import structlog

from kvtier_agent.storage import recovery
from kvtier_agent.storage.fileio import FileIO
from kvtier_agent.storage.manifest import MANIFEST_NAME

__all__ = ["sweep_memory", "sweep_volumes"]

ARENA_SUFFIXES: Final = (".l0", ".l1", ".table", ".table.new")
RUN_SUFFIXES: Final = (".sock", ".life", ".pages")
OURS: Final = (".life", ".pages")
"""A domain was served from a run folder if it has one of these there; a socket may be anybody's."""

log = structlog.get_logger(__name__)


def sweep_memory(arenas: Path, run_dir: Path, served: Collection[str]) -> list[str]:
    """Remove arenas, page tables and sockets of other domains; their names."""
    found: set[str] = set()
    for folder, marks, suffixes in (
        (arenas, ARENA_SUFFIXES, ARENA_SUFFIXES),
        (run_dir, OURS, RUN_SUFFIXES),
    ):
        names = {
            entry.name.removesuffix(mark)
            for mark in marks
            for entry in folder.glob(f"*{mark}")
            if not entry.is_dir()
        }
        for name in names - set(served):
            found.add(name)
            for suffix in suffixes:
                with contextlib.suppress(OSError):
                    (folder / f"{name}{suffix}").unlink()
    if found:
        log.info("what domains left that are not served any more is removed", domains=sorted(found))
    return sorted(found)


def sweep_volumes(mounts: Mapping[str, Path], served: Collection[str]) -> list[str]:
    """Remove pages of other domains from these volumes (name -> mount); the folders swept. May take
    as long as the drives do."""
    swept: list[str] = []
    for volume, mount in mounts.items():
        folders: list[Path] = []
        with contextlib.suppress(OSError):
            folders = sorted((mount / "kvtier").iterdir())
        for folder in folders:
            mine = folder / MANIFEST_NAME
            if folder.name in served or folder.is_symlink() or not mine.is_file():
                continue
            recovery.sweep(volume, mount, folder.name, FileIO())
            if not mine.exists():
                swept.append(str(folder))
    if swept:
        log.info("pages of domains that are not served any more are removed", folders=swept)
    return swept
