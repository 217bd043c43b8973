"""What a cache that people trust does, one named behaviour each, and what was seen of it.

Each is given `start`, which begins a life of the system on the behaviour's own folder, and says
whether it passed, and the figures. The same code judges every system.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from system import PAGE_BYTES, AdapterError, System

Start = Callable[[], System]
DRAM_PAGES = 64
"""64 MiB."""
ROOMY = 1024
CAP = 96
BATCH = 16
MIB = 1 << 20
LIVES = 4
"""Of a system that is its own client, each killed mid-store."""


@dataclass(frozen=True)
class Verdict:
    """`passed` is None where the behaviour does not apply to the system."""

    passed: bool | None
    seen: str


def counted(answer: dict[str, list[int]]) -> tuple[int, int, int]:
    """Right, wrong, missing."""
    return len(answer["right"]), len(answer["wrong"]), len(answer["missing"])


def opened(start: Start, disk_pages: int = ROOMY) -> System:
    system = start()
    system.open(DRAM_PAGES, disk_pages)
    return system


def stored_in_peace(system: System, count: int) -> list[int]:
    """Numbers of the pages that were stored, a batch at a time with time for the disk between: what
    is asked is whether pages are kept, not how fast a drive is."""
    stored: list[int] = []
    for first in range(0, count, BATCH):
        stored += system.ask("put", first=first, count=min(BATCH, count - first))["stored"]
        system.ask("settle")
    return stored


def bit_flip(start: Start) -> Verdict:
    """One bit of a stored page flips on the drive: the page is not served."""
    with opened(start) as system:
        stored = stored_in_peace(system, 4 * DRAM_PAGES)
        system.ask("close")
    with opened(start) as system:
        flipped = system.flip_bits(stored[:32], random.Random(1))
        right, wrong, missing = counted(system.ask("get", numbers=flipped))
    return Verdict(
        bool(flipped) and not wrong,
        f"one bit flipped in {len(flipped)} stored pages: {wrong} served with wrong bytes,"
        f" {missing} missed" + (f", {right} served right from memory" if right else ""),
    )


def disk_cap(start: Start) -> Verdict:
    """The cap on disk holds, and still does after four restarts, each followed by new pages."""
    sizes, note = [], ""
    for life in range(5):
        with start() as system:
            note = system.open(DRAM_PAGES, CAP).get("nothing", "")
            for part in range(5):
                system.ask("put", first=life * 1000 + part * 32, count=32)
            system.ask("settle")
            time.sleep(4)  # eviction by a timer has its turn
            system.ask("close")
            sizes.append(system.disk_bytes())
    shown = ", ".join(f"{size / MIB:.0f}" for size in sizes)
    return Verdict(
        max(sizes) <= CAP * PAGE_BYTES,
        f"cap {CAP} MiB: {shown} MiB after each of five lives" + (f" ({note})" if note else ""),
    )


def eviction_killed(start: Start) -> Verdict:
    """What makes room in DRAM dies: the probe says so, or it comes back; new pages are stored."""
    with opened(start) as system:
        system.ask("put", first=0, count=DRAM_PAGES)
        how = system.ask("kill_eviction")
        if "nothing" in how:
            return Verdict(None, how["nothing"])
        red, end = "", time.monotonic() + 5
        while not red and time.monotonic() < end:
            health = system.ask("health")
            red = "" if health["healthy"] else health["says"]
            time.sleep(0.02)
        time.sleep(2)
        offered = DRAM_PAGES
        stored = system.ask("put", seconds=900, first=5000, count=offered)["stored"]
        health = system.ask("health")
        tail = [n for n in stored if n >= 5000 + offered - 16]
        right, wrong, _ = counted(system.ask("get", numbers=tail))
    alive = len(stored) == offered and right == len(tail) and not wrong
    probe = f"probe within 5 s: {red.split('; ')[0][:160]!r}" if red else f"probe: {health['says']}"
    return Verdict(
        alive and (bool(red) or health["healthy"]),
        f"{how['what']}; {probe}; then {len(stored)} of {offered} new pages were stored,"
        f" {right} of the last {len(tail)} came back",
    )


def four_times_dram(start: Start) -> Verdict:
    """A working set of four times DRAM: every key that was stored is found again."""
    with opened(start) as system:
        stored = stored_in_peace(system, 4 * DRAM_PAGES)
        right, wrong, missing = counted(system.ask("get", seconds=900, numbers=stored))
    return Verdict(
        len(stored) == 4 * DRAM_PAGES and right == len(stored),
        f"{len(stored)} of {4 * DRAM_PAGES} pages stored; asked again: {right} right,"
        f" {missing} missing, {wrong} wrong",
    )


def restart(start: Start) -> Verdict:
    """After an orderly restart what was stored is found again."""
    with opened(start) as system:
        stored = stored_in_peace(system, 2 * DRAM_PAGES)
        system.ask("close")
    with opened(start) as system:
        right, wrong, missing = counted(system.ask("get", numbers=stored))
    return Verdict(
        len(stored) == 2 * DRAM_PAGES and right == len(stored),
        f"{len(stored)} pages stored; after a restart {right} right, {missing} missing,"
        f" {wrong} wrong",
    )


def crash(start: Start) -> Verdict:
    """After SIGKILL what had been stored, and was at rest, is found again."""
    with opened(start) as system:
        stored = stored_in_peace(system, 2 * DRAM_PAGES)
        system.kill()
    with opened(start) as system:
        right, wrong, missing = counted(system.ask("get", numbers=stored))
    return Verdict(
        len(stored) == 2 * DRAM_PAGES and right == len(stored),
        f"{len(stored)} pages stored; after SIGKILL and a restart {right} right,"
        f" {missing} missing, {wrong} wrong",
    )


def store_while_full(start: Start) -> Verdict:
    """DRAM and disk are full and stores go on: the newest pages are there, and the cap holds."""
    with opened(start, CAP) as system:
        offered = 4 * CAP
        begin = time.monotonic()
        stored = system.ask("put", seconds=1800, first=0, count=offered)["stored"]
        took = time.monotonic() - begin
        tail = [n for n in stored if n >= offered - 16]
        right, wrong, missing = counted(system.ask("get", numbers=tail))
        system.ask("settle")
        size = system.disk_bytes()
    return Verdict(
        len(tail) == right == 16 and not wrong and size <= CAP * PAGE_BYTES,
        f"{offered} pages into {DRAM_PAGES} MiB of DRAM and {CAP} MiB of disk in {took:.0f} s:"
        f" {len(stored)} stored; of the last 16, {len(tail)} were stored and {right} came back"
        f" ({missing} missing, {wrong} wrong); {size / MIB:.0f} MiB on disk",
    )


def client_killed(start: Start) -> Verdict:
    """Clients die mid-store: nothing they left half-written is served, and DRAM is free again."""
    with opened(start) as system:
        answer = system.ask("kill_clients", seconds=900, times=4, first=9000, count=16)
        if "kill_me" not in answer:
            free = answer.get("free")
            if free is None:
                stored = system.ask("put", first=0, count=DRAM_PAGES // 2)["stored"]
                right, wrong, _ = counted(system.ask("get", numbers=stored))
                free = right == DRAM_PAGES // 2 and not wrong
                answer["after"] = f"{right} of {DRAM_PAGES // 2} new pages stored and read"
            return Verdict(
                not answer["found"] and bool(free),
                f"{answer['killed']} clients killed when they had {answer['what']}:"
                f" {answer['found']} of their pages served; {answer['after']}",
            )
    chance, wrong, torn = random.Random(3), 0, 0
    for life in range(LIVES):
        with opened(start) as system:
            system.send("put", first=100 * life, count=60)
            time.sleep(chance.uniform(0.02, 0.4))
            system.kill()
            torn = sum(1 for p in system.folder.rglob("*.tmp"))
    with opened(start) as system:
        numbers = [100 * life + i for life in range(LIVES) for i in range(60)]
        right, wrong, _ = counted(system.ask("get", seconds=900, numbers=numbers))
    return Verdict(
        not wrong,
        f"{answer['nothing']}, killed {LIVES} times mid-store: {right} pages served right, {wrong}"
        f" wrong; {torn} unfinished files stay on disk",
    )


BEHAVIOURS: dict[str, Callable[[Start], Verdict]] = {
    "bit flip in a stored page": bit_flip,
    "disk cap over 4 restarts": disk_cap,
    "eviction thread killed": eviction_killed,
    "working set 4x DRAM, every key asked again": four_times_dram,
    "restart and re-read": restart,
    "SIGKILL and re-read": crash,
    "store while full": store_while_full,
    "client killed mid-store": client_killed,
}


def judge(name: str, start: Start) -> Verdict:
    """One behaviour; a system that breaks down over it has failed."""
    try:
        return BEHAVIOURS[name](start)
    except AdapterError as error:
        return Verdict(False, str(error))
