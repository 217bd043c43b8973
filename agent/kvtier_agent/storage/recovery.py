"""What an earlier process left on the volumes: found, offered to the cache, or removed.

Each folder has a manifest (`layout.json`) with the layout version and the geometry its pages have.

    newer layout           refused, nothing touched
    durability none, or    everything is removed
    another geometry       (those pages could never be asked for)
    else                   the header of every slot is read; whole headers of this geometry are
                           offered to the cache, oldest first

Then `keep_only` gives back the blocks of all slots that the cache did not take, and files that are
not ours to keep are removed, all before the first write: so the cap holds from the start.
Payloads are not read here; each is verified when it is first loaded.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.arena import runs
from kvtier_agent.cache.geometry import Geometry, GeometryError
from kvtier_agent.storage.fileio import FileIO
from kvtier_agent.storage.l2 import L2, Slots
from kvtier_agent.storage.segment import HEADER_BYTES, LAYOUT_VERSION, HeaderBlock, Segment
from kvtier_agent.storage.volume import LOCK_NAME, Volume, VolumeError

MANIFEST_NAME = "layout.json"
_SEGMENT_NAME = re.compile(r"segment-(\d{8})\.kv")
_COLUMNS = ("keys", "parents", "depths", "checksums", "slots")


@dataclass(frozen=True, slots=True)
class Found:
    """Pages found at start, oldest first. Arrays of length n."""

    keys: NDArray[np.uint8]
    parents: NDArray[np.uint8]
    depths: NDArray[np.uint32]
    checksums: NDArray[np.uint64]
    slots: Slots

    def only(self, which: NDArray[np.bool_]) -> Found:
        """Some of them."""
        return Found(
            self.keys[which],
            self.parents[which],
            self.depths[which],
            self.checksums[which],
            self.slots[which],
        )


NOTHING = Found(
    np.empty((0, 16), dtype=np.uint8),
    np.empty((0, 16), dtype=np.uint8),
    np.empty(0, dtype=np.uint32),
    np.empty(0, dtype=np.uint64),
    np.empty(0, dtype=np.uint32),
)


def geometry_of(volume: Volume) -> Geometry | None:
    """The geometry of the pages in the folder; None if there are none that can be read. Raises
    VolumeError when a newer version wrote it."""
    try:
        manifest = json.loads((volume.folder / MANIFEST_NAME).read_text())
        version = int(manifest["layout"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if version > LAYOUT_VERSION:
        raise VolumeError(
            f"volume {volume.name}: {volume.folder} has layout {version}, this agent knows"
            f" {LAYOUT_VERSION}; use the newer agent, or empty the folder"
        )
    try:
        return Geometry(**manifest["geometry"]) if version == LAYOUT_VERSION else None
    except (GeometryError, TypeError, KeyError):
        return None


def recover(l2: L2) -> Found:
    """Find what is there (or sweep it), before the first write. Raises VolumeError."""
    parts = []
    for volume in l2.volumes:
        keep = geometry_of(volume) == l2.geometry and l2.durability != "none"
        for path in sorted(volume.folder.iterdir()):
            match = _SEGMENT_NAME.fullmatch(path.name)
            if path.name == LOCK_NAME:
                continue
            number = int(match[1]) if match else -1
            if keep and match and number not in l2.segments and not path.is_symlink():
                found = _read_headers(l2, volume, path, number)
                if found is not None:
                    parts.append(found)
                    continue
            _remove(path)
        _write_manifest(volume, l2.geometry)
    if not parts:
        return NOTHING
    sequence = np.concatenate([numbers for _, numbers in parts])
    order = np.argsort(sequence, kind="stable")
    l2.sequence = int(sequence.max()) + 1 if sequence.size else 1
    columns = [np.concatenate([getattr(f, name) for f, _ in parts])[order] for name in _COLUMNS]
    return Found(*columns)


def clear(volume: Volume, geometry: Geometry) -> None:
    """Empty a folder and mark it for pages of `geometry`. Raises VolumeError."""
    geometry_of(volume)
    for path in volume.folder.iterdir():
        if path.name != LOCK_NAME:
            _remove(path)
    _write_manifest(volume, geometry)


def sweep(name: str, mount: Path, domain: str, io: FileIO) -> None:
    """Empty the folder of a volume that is not in use, if there is one; what cannot be removed now,
    what another agent holds and what a newer version wrote stays."""
    if not (mount / "kvtier" / domain).is_dir():
        return
    with contextlib.suppress(VolumeError, OSError):
        # Whatever file system it is on by now: nothing is written there.
        volume = Volume(name, mount, domain, allow_root_filesystem=True, io=io)
        try:
            geometry_of(volume)
            for path in volume.folder.iterdir():
                if path.name == MANIFEST_NAME or _SEGMENT_NAME.fullmatch(path.name):
                    _remove(path)
        finally:
            volume.close()


def keep_only(l2: L2, slots: Slots) -> None:
    """Give back the blocks of every slot but these."""
    kept: dict[int, list[int]] = {}
    for slot in slots.tolist():
        kept.setdefault(slot // l2.per_segment, []).append(slot % l2.per_segment)
    for number, (segment, _) in list(l2.segments.items()):
        mine = kept.get(number, [])
        if not mine:
            l2.drop_segment(number)
            continue
        free = np.ones(segment.slots, dtype=bool)
        free[mine] = False
        for first, count in runs(np.flatnonzero(free).astype(np.uint32)):
            segment.punch(first, count)
        segment.laid[:] = ~free


def _read_headers(
    l2: L2, volume: Volume, path: Path, number: int
) -> tuple[Found, NDArray[np.uint64]] | None:
    """None: the file cannot be read."""
    try:
        segment = Segment(path, number, l2.per_segment, l2.slot_bytes, l2.io, create=False)
        count = min(segment.slots, os.fstat(segment.fd).st_size // segment.stride)
    except OSError:
        return None
    l2.segments[number] = (segment, volume)
    headers = HeaderBlock(segment.slots)
    for slot in range(count):
        with contextlib.suppress(OSError):
            done = l2.io.read(segment.fd, [headers.bytes[slot]], slot * segment.stride)
            if done != HEADER_BYTES:
                headers.bytes[slot] = 0
    good = headers.valid(segment.slots, l2.geometry.fingerprint, l2.geometry.page_bytes)
    where = np.flatnonzero(good)
    fields = headers.fields[where]
    found = Found(
        np.ascontiguousarray(fields["key"]),
        np.ascontiguousarray(fields["parent"]),
        fields["depth"].astype(np.uint32),
        fields["checksum"].astype(np.uint64),
        (where + number * l2.per_segment).astype(np.uint32),
    )
    return found, fields["sequence"].astype(np.uint64)


def _write_manifest(volume: Volume, geometry: Geometry) -> None:
    text = json.dumps({"layout": LAYOUT_VERSION, "geometry": asdict(geometry)}, indent=1)
    temporary = volume.folder / (MANIFEST_NAME + ".new")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.fdopen(os.open(temporary, flags, 0o600), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(volume.folder / MANIFEST_NAME)
        for folder in (volume.folder, *volume.folder.parents[:2]):
            volume.io.flush_folder(folder)
    except OSError as error:
        reasons = {errno.ENOSPC: "VolumeFull", errno.EROFS: "VolumeReadOnly"}
        raise VolumeError(
            f"volume {volume.name}: cannot write to {volume.folder}: {error.strerror}",
            reasons.get(error.errno or 0, "VolumeUnusable"),
        ) from error


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
