"""Whose pages an earlier agent left in a trust domain: looked at without a lock, nothing changed.

The volumes that a policy will name are not known when the sockets open; those that it may name are.
So an engine that comes first is told from the ones whose pages are there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.storage.manifest import (
    MANIFEST_NAME,
    NewerLayoutError,
    newest_geometry,
    parse,
)


def geometry_left(mounts: Iterable[Path], domain: str) -> Geometry | None:
    """The geometry of the pages in a domain's folders on these volumes, those that were written
    last; None where there are none, or none that this version reads."""
    found = []
    for mount in mounts:
        folder = mount / "kvtier" / domain
        with contextlib.suppress(OSError, NewerLayoutError):
            held = parse((folder / MANIFEST_NAME).read_text(errors="replace"))
            if any(folder.glob("segment-*.kv")):
                found.append(held)
    return newest_geometry(found)
