"""Planting faults in stored pages, to see that none of them is ever served.

A cache whose tests never meet a bad page proves nothing about bad pages. So the replay makes some:
it waits until the agent is at rest, picks pages at random, half of them in DRAM and half on NVMe,
flips a byte in each *where it is stored*, and asks for each at once, the way an engine would:

- DRAM (and, where there is nothing else, L0 in shared memory): through the mapped arena.
- NVMe: in the segment files. They are searched for the page's first bytes, which follow from its
  key, so that this test knows nothing of how the files are laid out. Every copy found is damaged,
  also one that an earlier life of the page left behind.

A page that is asked for and not delivered has done what it should; the agent's own count of
quarantined pages says the rest.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtier_agent.cache.identity import KeyArray
from kvtier_agent.replay.content import Content
from kvtier_agent.replay.readings import settled_stats
from kvtier_agent.server.client import Client

_ASKED_AT_ONCE = 4096
_ALIGNMENT = 4096
_DEADLINE_MILLISECONDS = 10_000


def corrupt_stored_pages(
    client: Client,
    content: Content,
    known: KeyArray,
    count: int,
    *,
    volumes: Mapping[str, Path],
    random: np.random.Generator,
) -> dict[int, int]:
    """Damage up to `count` stored pages out of `known` and ask for each; how many, by tier."""
    settled_stats(client)
    chosen = _choose(client, known, count, bool(volumes), random)
    planted = {0: 0, 1: 0, 2: 0}
    for tier in (1, 0):
        for index in np.flatnonzero(chosen == tier):
            planted[tier] += _damage_in_arena(client, content, known[index : index + 1])
    on_nvme = np.flatnonzero(chosen == 2)
    if on_nvme.size:
        keys = known[on_nvme]
        damaged = _damage_in_files(content, keys, volumes.values(), random)
        for index in np.flatnonzero(damaged):
            _ask(client, content, keys[index : index + 1])
        planted[2] += int(damaged.sum())
    return planted


def _choose(
    client: Client, known: KeyArray, count: int, files: bool, random: np.random.Generator
) -> npt.NDArray[np.uint8]:
    """The tier of each page that is to be damaged, 255 for all others."""
    tiers = np.concatenate(
        [
            client.lookup(known[start : start + _ASKED_AT_ONCE]).tiers
            for start in range(0, len(known), _ASKED_AT_ONCE)
        ]
    )
    chosen = np.full(len(known), 255, dtype=np.uint8)
    order = random.permutation(len(known))
    shares = ((2, count // 2 if files else 0), (1, count), (2, count if files else 0), (0, count))
    for tier, at_most in shares:
        left = min(at_most, count - int((chosen != 255).sum()))
        here = [i for i in order if tiers[i] == tier and chosen[i] == 255][: max(0, left)]
        chosen[here] = tier
    return chosen


def _damage_in_arena(client: Client, content: Content, key: KeyArray) -> int:
    """Flip a byte of one page in the mapped arena, then ask for it; 1 if that was possible."""
    with client.load(key, deadline_milliseconds=_DEADLINE_MILLISECONDS) as lease:
        if not lease.ok(0):
            return 0
        page = lease.page(0)
        page[len(page) // 2] ^= 0x55
    _ask(client, content, key)
    return 1


def _ask(client: Client, content: Content, key: KeyArray) -> None:
    """Ask for one page as an engine does; a bad copy is reported with the release."""
    page = np.empty((1, content.page_bytes), dtype=np.uint8)
    with client.load(key, deadline_milliseconds=_DEADLINE_MILLISECONDS) as lease:
        lease.copy_to(page)


def _damage_in_files(
    content: Content,
    keys: KeyArray,
    folders: Iterable[Path],
    random: np.random.Generator,
) -> npt.NDArray[np.bool_]:
    """Flip a byte in every copy of these pages in the files below `folders`; which were found."""
    pages = np.empty((len(keys), content.page_bytes), dtype=np.uint8)
    content.fill(keys, pages)
    first_words = pages.view(np.uint64)[:, 0]
    order = np.argsort(first_words)
    sorted_words = first_words[order]
    found = np.zeros(len(keys), dtype=np.bool_)
    for folder in folders:
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            words = _words_at_alignment(path)
            places = np.minimum(np.searchsorted(sorted_words, words), len(keys) - 1)
            for place in np.flatnonzero(sorted_words[places] == words):
                index = int(order[places[place]])
                offset = int(place) * _ALIGNMENT + int(random.integers(content.page_bytes))
                found[index] |= _flip(path, offset)
    return found


def _words_at_alignment(path: Path) -> npt.NDArray[np.uint64]:
    """The first eight bytes at every multiple of 4096 in a file."""
    length = path.stat().st_size // _ALIGNMENT * _ALIGNMENT
    if not length:
        return np.empty(0, dtype=np.uint64)
    whole = np.memmap(path, dtype=np.uint64, mode="r", shape=(length // 8,))
    return np.array(whole[:: _ALIGNMENT // 8])


def _flip(path: Path, offset: int) -> bool:
    descriptor = os.open(path, os.O_RDWR)
    try:
        byte = os.pread(descriptor, 1, offset)
        if not byte:
            return False
        os.pwrite(descriptor, bytes([byte[0] ^ 0x55]), offset)
        # The agent may read past the page cache.
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return True
