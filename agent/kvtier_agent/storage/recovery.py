"""What an earlier process left on the volumes: found, offered to the cache, or removed.

Each folder has a manifest (`manifest.py`) with the layout version and the geometry its pages have,
and a journal (`journal.py`).

    newer layout           refused, nothing touched
    durability none, or    everything is removed
    older layout, another geometry, a journal about other segments, a volume that was away
    else                   the journal is read; pages whose slot lies inside its segment's file are
                           offered to the cache, oldest first

Segments are not read, only opened. Those without a record are removed, and so is every file that is
not ours to keep. Then `keep_only` gives back the blocks of all slots that the cache did not take.
All of it comes before the first write: so the cap holds from the start. Payloads are verified when
they are first loaded. An error while looking removes nothing (`unreadable`): only what was read and
makes no sense is removed.
"""

from __future__ import annotations

import contextlib
import errno
import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog
from numpy.typing import NDArray

from kvtier_agent.cache.adoption import lasts
from kvtier_agent.cache.arena import Progress
from kvtier_agent.cache.arena import unseen as nobody
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.record import as_u64_pairs
from kvtier_agent.cache.words import take_records
from kvtier_agent.storage import manifest
from kvtier_agent.storage.fileio import FileIO
from kvtier_agent.storage.journal_files import TEMPORARY, is_journal_file
from kvtier_agent.storage.journal_format import FORMAT_VERSION, NO_EVENTS, Events, NewerFormatError
from kvtier_agent.storage.journal_reader import Contents, Live, read_journal, unseen
from kvtier_agent.storage.l2 import L2, Slots
from kvtier_agent.storage.manifest import MANIFEST_NAME, Manifest, newer, unwritable
from kvtier_agent.storage.segment import Segment
from kvtier_agent.storage.unreadable import unreadable
from kvtier_agent.storage.volume import LOCK_NAME, Volume, VolumeError

_SEGMENT_NAME = re.compile(r"segment-(\d{8})\.kv")
_NO_FILE = (errno.ENOENT, errno.EISDIR, errno.ELOOP, errno.ENXIO)
"""What the system says of a name that is no file."""

log = structlog.get_logger("kvtier.storage.recovery")


@dataclass(frozen=True, slots=True)
class Found:
    """Pages found at start, each key once, oldest first. Arrays of length n."""

    keys: NDArray[np.uint8]
    parents: NDArray[np.uint8]
    depths: NDArray[np.uint32]
    checksums: NDArray[np.uint64]
    slots: Slots
    tenants: NDArray[np.uint16]

    def only(self, which: NDArray[np.bool_]) -> Found:
        """Some of them."""
        if which.all():
            return self
        return Found(
            self.keys[which],
            self.parents[which],
            self.depths[which],
            self.checksums[which],
            self.slots[which],
            self.tenants[which],
        )


NOTHING = Found(
    np.empty((0, 16), dtype=np.uint8),
    np.empty((0, 16), dtype=np.uint8),
    np.empty(0, dtype=np.uint32),
    np.empty(0, dtype=np.uint64),
    np.empty(0, dtype=np.uint32),
    np.empty(0, dtype=np.uint16),
)


def geometry_of(volume: Volume, given_up: Collection[str] = ()) -> Geometry | None:
    """The geometry of the pages in the folder; None if there are none that can be read. `given_up`:
    see `recover`. Raises VolumeError when a newer version wrote it, or the manifest cannot be
    looked at."""
    return manifest.read(volume, given_up).geometry


def recover(
    l2: L2,
    live: Live = unseen,
    given_up: Collection[str] = (),
    clock: Callable[[], float] = time.time,
) -> Found:
    """Find what is there (or sweep it), before the first write. `live` is called with the bytes of
    journal read at a time, and with 0 for each file. `given_up`: names of volumes on which what
    cannot be read counts as not being there. `clock`: seconds since the epoch. Raises VolumeError;
    nothing is left open then."""
    try:
        return _recover(l2, live, given_up, clock)
    except BaseException:
        for segment, _ in l2.segments.values():
            segment.close()
        l2.segments.clear()
        l2.journals.close()
        raise


def _recover(l2: L2, live: Live, given_up: Collection[str], clock: Callable[[], float]) -> Found:
    l2.journals.durability = l2.durability
    manifests = {volume.name: manifest.read(volume, given_up) for volume in l2.volumes}
    away = manifest.away({n: m for n, m in manifests.items() if m.geometry == l2.geometry})
    last = max((one.start for one in manifests.values()), default=0)
    l2.journals.start = max(last + 1, int(clock()))
    read = []
    for volume in l2.volumes:
        held = manifests[volume.name]
        if volume.name in away:
            held = Manifest(reason="it was away while other volumes of the tier were in use")
        read.append((volume, *_read(l2, volume, held, live, given_up)))
    for volume, _, pages in read:
        # What it claims is taken from the others: only by one that can go on with its journal.
        if len(read) > 1 and len(pages):
            volume.prove()
    owners: dict[int, tuple[int, str]] = {}
    for volume, contents, pages in read:
        generations = contents.generations
        for number in np.unique(pages["slot"] // l2.per_segment).tolist():
            # A volume that was away for a while may have segments that another one has by now.
            if generations[number] > owners.get(number, (-1, ""))[0]:
                owners[number] = (generations[number], volume.name)
        for number, generation in generations.items():
            known = l2.journals.generations.get(number, 0)
            l2.journals.generations[number] = max(known, generation)
    for volume, contents, _ in read:
        mine = {number for number, (_, name) in owners.items() if name == volume.name}
        _clear(volume, mine, contents, l2, given_up, live)
        # A journal that came back after a power cut would speak of segments that were begun anew
        # meanwhile, under numbers that start over with the journal.
        _make_last(volume, needed=bool(contents.reason))
    kept = []
    for volume, contents, pages in read:
        manifest.write(volume, l2.geometry, l2.journals.start, manifests)
        whole = _inside(l2, volume, pages["slot"], given_up)
        if lost := int(whole.size - whole.sum()):
            log.warning(
                "the journal has pages whose segments are gone or shorter",
                volume=volume.name, pages=lost,
            )  # fmt: skip
        kept.append(pages if whole.all() else take_records(pages, np.flatnonzero(whole)))
        if l2.durability != "none":
            try:
                l2.journals.open(volume, contents)
            except OSError as error:
                raise unwritable(volume, error) from error
            with contextlib.suppress(OSError):  # else they are dropped again next time
                l2.journals.gone(volume, pages["slot"][~whole])
    found = kept[0] if len(kept) == 1 else np.concatenate([NO_EVENTS, *kept])
    order = np.argsort(found["sequence"], kind="stable")
    l2.sequence = int(found["sequence"][order[-1]]) + 1 if len(found) else 1
    l2.journals.found = found["slot"][order]
    newest = lasts(as_u64_pairs(found["key"][order]))
    order = order if newest.all() else order[newest]
    return Found(
        found["key"][order],
        found["parent"][order],
        found["depth"][order],
        found["checksum"][order],
        found["slot"][order],
        found["tenant"][order],
    )


def clear(
    volume: Volume, l2: L2, given_up: Collection[str] = (), progress: Progress = nobody
) -> None:
    """Empty a folder, and mark it as one of `l2`, which it is to join. `given_up`: see `recover`.
    As long as the drive takes, with `progress` called for each file. Raises VolumeError."""
    geometry_of(volume, given_up)
    try:
        names = volume.io.names(volume.folder)
    except OSError as error:
        raise unreadable(volume, str(volume.folder), error) from error
    for name in names:
        if name != LOCK_NAME:
            _remove(volume, name)
            progress()
    _make_last(volume, needed=True)
    others = [other.name for other in l2.volumes]
    manifest.write(volume, l2.geometry, l2.journals.start, {*others, volume.name})


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
            for name in io.names(volume.folder):
                ours = name == MANIFEST_NAME or _SEGMENT_NAME.fullmatch(name)
                if ours or is_journal_file(name.removesuffix(TEMPORARY)):
                    with contextlib.suppress(VolumeError):
                        _remove(volume, name)
        finally:
            volume.close()


def keep_only(l2: L2, slots: Slots) -> None:
    """Give back segments without any of these slots, and the blocks behind the last of each."""
    found, l2.journals.found = l2.journals.found, np.empty(0, dtype=np.uint32)
    dropped = _by_segment(l2, np.sort(np.setdiff1d(found, slots, assume_unique=True)))
    kept = _by_segment(l2, np.sort(slots))
    for number, (segment, volume) in list(l2.segments.items()):
        if number in dropped:
            with contextlib.suppress(OSError):  # else they are found again, and dropped again
                l2.journals.gone(volume, dropped[number])
        if number not in kept:
            l2.drop_segment(number)
            continue
        inside = kept[number] % l2.per_segment
        end = int(inside[-1]) + 1
        if end < segment.slots:
            segment.punch(end, segment.slots - end)
        # Slots in front that hold nothing wait for the rest of their segment, with their blocks.
        whole = segment.allocated >= end * l2.stride
        segment.laid[:] = False
        segment.laid[slice(0, end) if whole else inside] = True


def _by_segment(l2: L2, slots: Slots) -> dict[int, Slots]:
    """Ascending slots, by segment."""
    numbers = slots // l2.per_segment
    cuts = np.flatnonzero(np.diff(numbers)) + 1
    return {int(part[0]) // l2.per_segment: part for part in np.split(slots, cuts) if part.size}


def _read(
    l2: L2, volume: Volume, held: Manifest, live: Live, given_up: Collection[str]
) -> tuple[Contents, Events]:
    """What the journal says, and its pages; nothing, with the reason logged, where it is of no
    use. `held`: its manifest. Raises VolumeError."""
    whole = volume.name not in given_up
    geometry, reason = held.geometry, held.reason
    if geometry is not None and geometry != l2.geometry:
        reason = "its pages are of another model or layout"
    if l2.durability == "none" or geometry != l2.geometry:
        contents = Contents(reason=reason)
    else:
        try:
            contents = read_journal(volume.folder, l2.journals.identity, l2.io, live, whole=whole)
        except NewerFormatError as error:
            raise newer(volume, f"journal format {error.version}", FORMAT_VERSION) from error
        except OSError as error:
            if whole:
                raise unreadable(volume, f"the journal in {volume.folder}", error) from error
            contents = Contents(reason=f"its journal cannot be read: {error.strerror}")
    if contents.reason:
        log.warning("NVMe starts cold", volume=volume.name, reason=contents.reason)
    pages = np.concatenate([NO_EVENTS, *contents.pages])
    contents.pages.clear()
    if contents.dropped_bytes:
        log.warning(
            "the journal was cut short, as a power cut does",
            volume=volume.name,
            dropped_bytes=contents.dropped_bytes,
            pages=len(pages),
        )
    return contents, pages


def _clear(
    volume: Volume,
    segments: set[int],
    contents: Contents,
    l2: L2,
    given_up: Collection[str],
    live: Live,
) -> None:
    """Open these segments and remove every file that is none of them nor of the journal. Raises
    VolumeError."""
    journal = {name for name, _ in contents.old.files()} | set(contents.stale)
    try:
        names = l2.io.names(volume.folder)
    except OSError as error:
        raise unreadable(volume, str(volume.folder), error) from error
    for name in names:
        live(0)
        match = _SEGMENT_NAME.fullmatch(name)
        if name in (LOCK_NAME, MANIFEST_NAME) or name in journal:
            continue
        number = int(match[1]) if match else -1
        path = volume.folder / name
        if number in segments and not path.is_symlink():
            try:
                generation = l2.journals.generations.get(number, 0)
                segment = Segment(
                    path, number, l2.per_segment, l2.payload_bytes, l2.io, create=False,
                    generation=generation,
                )  # fmt: skip
            except OSError as error:
                if error.errno not in _NO_FILE and volume.name not in given_up:
                    raise unreadable(volume, str(path), error) from error
            else:
                l2.segments[number] = (segment, volume)
                continue
        _remove(volume, name)


def _inside(l2: L2, volume: Volume, slots: Slots, given_up: Collection[str]) -> NDArray[np.bool_]:
    """Which slots lie in a file of this volume, as far as it reaches. Raises VolumeError."""
    numbers, which = np.unique(slots // l2.per_segment, return_inverse=True)
    counts = np.zeros(len(numbers), dtype=np.int64)
    for i, number in enumerate(numbers.tolist()):
        held = l2.segments.get(number)
        if held is not None and held[1] is volume:
            try:
                counts[i] = l2.io.size(held[0].fd) // l2.stride
            except OSError as error:
                if volume.name not in given_up:
                    raise unreadable(volume, str(held[0].path), error) from error
    whole: NDArray[np.bool_] = slots % l2.per_segment < counts[which]
    return whole


def _make_last(volume: Volume, *, needed: bool) -> None:
    """What was removed from a folder does not come back. Raises VolumeError where that is
    `needed`."""
    try:
        volume.io.flush_folder(volume.folder)
    except OSError as error:
        if needed:
            raise unwritable(volume, error) from error


def _remove(volume: Volume, name: str) -> None:
    """Remove a file; a segment that cannot go is found again, without a record, and tried again.
    Raises VolumeError for one of the journal, by whose words it would be believed."""
    try:
        volume.io.unlink(volume.folder / name)
    except FileNotFoundError:
        pass
    except OSError as error:
        if is_journal_file(name):
            raise unwritable(volume, error) from error
