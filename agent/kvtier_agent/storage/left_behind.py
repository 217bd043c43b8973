"""Whose pages an earlier agent left in a trust domain: looked at without a lock, nothing changed.

The volumes that a policy will name are not known when the sockets open; those that it may name are.
So an engine that comes first is told from the ones whose pages are there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from kvtier_agent.cache.geometry import Geometry, GeometryError
from kvtier_agent.storage.recovery import MANIFEST_NAME
from kvtier_agent.storage.segment import LAYOUT_VERSION


def geometry_left(mounts: Iterable[Path], domain: str) -> Geometry | None:
    """The geometry of the pages in a domain's folders on these volumes; None where there are none,
    or none that this version reads."""
    for mount in mounts:
        folder = mount / "kvtier" / domain
        try:
            manifest = json.loads((folder / MANIFEST_NAME).read_text())
            if manifest["layout"] == LAYOUT_VERSION and any(folder.glob("segment-*.kv")):
                return Geometry(**manifest["geometry"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError, GeometryError):
            continue
    return None
