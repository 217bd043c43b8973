"""The manifest of a volume's folder (`layout.json`): whose pages lie there, and since when.

    layout      version of the files
    geometry    of the pages
    start       which start of the tier wrote it: seconds since the epoch, or one more than before
    volumes     names of the volumes that took part in it

A volume may be away for a while: mounted read-only, full, not named by a policy. The numbers of its
segments are used by others meanwhile, and their generations start over. So each start writes a
number that is higher than any it knows to all volumes that take part, after everything that is not
to be kept is gone from all of them, and before the first page is written. A volume whose number is
lower than that of another one was away, unless the other names it: then the agent ended between
the two manifests, and no page was written.

An older agent writes neither `start` nor `volumes`; that counts as 0, and nobody was away.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass

from kvtier_agent.cache.geometry import Geometry, GeometryError
from kvtier_agent.storage.journal_files import TEMPORARY
from kvtier_agent.storage.segment import LAYOUT_VERSION
from kvtier_agent.storage.unreadable import unreadable
from kvtier_agent.storage.volume import Volume, VolumeError, refused

MANIFEST_NAME = "layout.json"
NO_SENSE = "its manifest makes no sense"


@dataclass(frozen=True, slots=True)
class Manifest:
    """`geometry`: None where there are no pages of use, for this `reason` (empty: no manifest)."""

    geometry: Geometry | None = None
    reason: str = ""
    start: int = 0
    volumes: frozenset[str] = frozenset()


class NewerLayoutError(ValueError):
    """A newer version wrote it."""

    def __init__(self, version: int) -> None:
        super().__init__(f"layout {version}")
        self.version = version


def parse(text: str) -> Manifest:
    """Never fails but with NewerLayoutError."""
    try:
        fields = json.loads(text)
        version = int(fields["layout"])
        start, volumes = int(fields.get("start", 0)), frozenset(map(str, fields.get("volumes", ())))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return Manifest(reason=NO_SENSE)
    if version > LAYOUT_VERSION:
        raise NewerLayoutError(version)
    if version < LAYOUT_VERSION:
        return Manifest(reason=f"it has layout {version}, this agent writes {LAYOUT_VERSION}")
    try:
        return Manifest(Geometry(**fields["geometry"]), "", start, volumes)
    except (GeometryError, TypeError, KeyError):
        return Manifest(reason=NO_SENSE)


def away(manifests: Mapping[str, Manifest]) -> set[str]:
    """Which volumes, by name, were away while others of them were in use. Pure."""
    latest = max((one.start for one in manifests.values()), default=0)
    there = {name for one in manifests.values() if one.start == latest for name in one.volumes}
    return {name for name, one in manifests.items() if one.start < latest and name not in there}


def newest_geometry(manifests: Iterable[Manifest]) -> Geometry | None:
    """The geometry of the pages that were written last; None: there are none. Pure."""
    of_use = [one for one in manifests if one.geometry is not None]
    return max(of_use, key=lambda one: one.start).geometry if of_use else None


def read(volume: Volume, given_up: Collection[str] = ()) -> Manifest:
    """The manifest in a volume's folder. `given_up`: names of volumes on which what cannot be read
    counts as not being there. Raises VolumeError when a newer version wrote it, or when it cannot
    be looked at."""
    path = volume.folder / MANIFEST_NAME
    try:
        return parse(path.read_text(errors="replace"))
    except FileNotFoundError:
        return Manifest()
    except NewerLayoutError as error:
        raise newer(volume, str(error), LAYOUT_VERSION) from error
    except OSError as error:
        if volume.name not in given_up:
            raise unreadable(volume, str(path), error) from error
        return Manifest(reason=f"its manifest cannot be read: {error.strerror}")


def write(volume: Volume, geometry: Geometry, start: int, volumes: Iterable[str]) -> None:
    """A new manifest, which lasts. Raises VolumeError."""
    fields = {
        "layout": LAYOUT_VERSION,
        "geometry": asdict(geometry),
        "start": start,
        "volumes": sorted(volumes),
    }
    text = json.dumps(fields, indent=1)
    temporary = volume.folder / (MANIFEST_NAME + TEMPORARY)
    io = volume.io
    try:
        fd, _ = io.open(temporary, create=True, direct=False)
        try:
            io.truncate(fd, 0)
            if io.write(fd, [text.encode()], 0) != len(text):
                io.noticed("write", "short")
                raise OSError(errno.ENOSPC, "No space left on device")
            io.flush(fd)
        finally:
            io.close(fd)
        io.rename(temporary, volume.folder / MANIFEST_NAME)
        for folder in (volume.folder, *volume.folder.parents[:2]):
            io.flush_folder(folder)
    except OSError as error:
        raise unwritable(volume, error) from error


def newer(volume: Volume, what: str, known: int) -> VolumeError:
    """A newer version wrote `what`."""
    return VolumeError(
        f"volume {volume.name}: {volume.folder} has {what}, this agent knows {known}; use the"
        " newer agent, or empty the folder"
    )


def unwritable(volume: Volume, error: OSError) -> VolumeError:
    """Nothing can be written into the folder."""
    return refused(volume.name, f"cannot write to {volume.folder}", error)
