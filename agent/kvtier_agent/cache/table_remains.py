"""The page table that an earlier process left: read, never mapped and never reinterpreted.

The file is read into memory of our own, so one that was cut short is an error and not a signal.
What is not exactly as this version would have written it is `RemainsError`, with the reason.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache import table_notes
from kvtier_agent.cache.arena import KeptFile, check_ours
from kvtier_agent.cache.geometry import Geometry, GeometryError
from kvtier_agent.cache.identity import KEY_VERSION
from kvtier_agent.cache.page_table import TABLE_MODE
from kvtier_agent.cache.record import RECORD
from kvtier_agent.cache.table_view import (
    HEADER,
    HEADER_BYTES,
    LAYOUT_VERSION,
    MAGIC,
    table_bytes,
)
from kvtier_agent.cache.warm import may_be_in_l1
from kvtier_agent.cache.words import as_words, take_records

CHUNK_RECORDS = 1 << 14


class RemainsError(Exception):
    """What is there is not taken over; why, in one line."""


@dataclass(frozen=True, slots=True, eq=False)
class Remains:
    """`records`: copies of those that may be in L1. `names`: of frozen prefixes, by number from 1.
    `l0_backed`: bytes at the start of L0 with memory behind them; `l1`: the arena file."""

    geometry: Geometry
    records: NDArray[Any]
    names: list[str]
    l0_backed: int
    l1: KeptFile


def read_remains(path: Path, gid: int | None) -> Remains | None:
    """None: there is no table, or no engine ever told it a geometry. Raises RemainsError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RemainsError(f"cannot open the page table {path}: {error.strerror}") from error
    try:
        return _read(fd, path, gid)
    except OSError as error:
        raise RemainsError(f"cannot read the page table {path}: {error.strerror}") from error
    finally:
        os.close(fd)


def _read(fd: int, path: Path, gid: int | None) -> Remains | None:
    status = os.fstat(fd)
    problem = check_ours(status, TABLE_MODE, gid)
    if problem:
        raise RemainsError(f"the page table {path.name}: {problem}")
    raw = os.pread(fd, HEADER_BYTES, 0)
    if len(raw) < HEADER.itemsize:
        raise RemainsError(f"the page table {path.name} is cut short")
    header = np.frombuffer(raw, dtype=HEADER, count=1)[0]
    if bytes(header["magic"]) != MAGIC:
        raise RemainsError(f"{path.name} is no page table of kvtier")
    version = int(header["layout_version"])
    if version != LAYOUT_VERSION or int(header["record_bytes"]) != RECORD.itemsize:
        raise RemainsError(
            f"the page table {path.name} has layout {version}, this agent has {LAYOUT_VERSION}"
        )
    capacity = int(header["capacity"])
    if status.st_size < table_bytes(int(header["max_pages"])) or len(raw) < HEADER_BYTES:
        raise RemainsError(f"the page table {path.name} is cut short")
    if capacity > int(header["max_pages"]) or int(header["pages"]) > capacity:
        raise RemainsError(f"the header of the page table {path.name} contradicts itself")
    note = table_notes.read_note(raw, table_notes.GEOMETRY)
    if note is None and not int(header["pages"]):
        return None
    geometry = _geometry(note, path)
    names = table_notes.read_note(raw, table_notes.FROZEN)
    return Remains(
        geometry=geometry,
        records=_records(fd, capacity, path),
        names=names if _are_names(names) else [],
        l0_backed=int(header["l0_backed"]),
        l1=KeptFile(int(note["l1_inode"]), int(note["l1_bytes"]), int(header["l1_backed"])),
    )


def _geometry(note: Any, path: Path) -> Geometry:
    try:
        if note["key_version"] != KEY_VERSION:
            raise RemainsError(
                f"its page keys are of version {note['key_version']}, this agent's of {KEY_VERSION}"
            )
        geometry = Geometry(**note["geometry"])
        named = geometry.stored_as.hex()
        if note["fingerprint"] == geometry.fingerprint.hex() != named:
            raise RemainsError(
                f"its pages are of one piece each, this agent's of {geometry.units} transfer units"
            )
        if note["fingerprint"] != named:
            raise RemainsError("its pages are of a geometry that this agent names differently")
        int(note["l1_inode"]), int(note["l1_bytes"])
    except (GeometryError, KeyError, TypeError, ValueError):
        raise RemainsError(f"the page table {path.name} does not say what its pages are") from None
    return geometry


def _are_names(value: Any) -> bool:
    return (
        isinstance(value, list)
        and all(isinstance(name, str) for name in value)
        and len(set(value)) == len(value)
    )


def _records(fd: int, capacity: int, path: Path) -> NDArray[Any]:
    """Those that may be in L1, read to where the next ones are kept: memory that nothing is kept in
    is never touched."""
    records = np.empty(capacity, dtype=RECORD)
    words = as_words(records)
    kept = 0
    for first in range(0, capacity, CHUNK_RECORDS):
        part = records[kept : kept + min(CHUNK_RECORDS, capacity - first)]
        into = part.view(np.uint8)
        if os.preadv(fd, [into.data], HEADER_BYTES + first * RECORD.itemsize) < into.nbytes:
            raise RemainsError(f"the page table {path.name} is cut short")
        good = may_be_in_l1(part)
        if not good.all():
            part = take_records(part, np.flatnonzero(good))
            words[kept : kept + len(part)] = as_words(part)
        kept += len(part)
    return records[:kept]
