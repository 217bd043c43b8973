"""kvtier beside a peer on this machine: one table, and JSON.

    make bench-peers                               the table
    make bench-peers ARGS='--json -'               for programs

Rounds alternate: in one kvtier goes first, in the next the peer. A row is the median of the
rounds, with the least and the most. Both keep pages of the same size in DRAM; both hash the
prompt's tokens into keys, except in the rows that say otherwise. kvtier keeps a checksum of each
page and verifies it on each load; what the peer promises is said with its figures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from environment import PeerError
from kvtier_agent.bench import machine
from kvtier_agent.bench.figures import Figure, Spread, alternate
from kvtier_agent.cache.identity import chain_keys
from lmcache import CHUNK_TOKENS, LMCache
from lmcache import VERSION as LMCACHE_VERSION

KVTIER = [sys.executable, "-m", "kvtier_cli.main", "bench"]
MIB = 1 << 20
LOOKUP_KEYS = 1024
LOOKUP_PAGE_BYTES = 8192
PROMPTS = 8
BASELINE = f"LMCache {LMCACHE_VERSION} MP server (no checksum)"


@dataclass
class Rounds:
    """Every figure of one side, a value a round."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        self.values.setdefault(name, []).append(value)


def kvtier(*words: object) -> dict[str, float]:
    """Name -> figure of one run of `kvtier bench`. Raises `PeerError`."""
    done = subprocess.run(
        [*KVTIER, *map(str, words), "--json", "-"], capture_output=True, text=True
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise PeerError(f"kvtier bench {words[0]}: {lines[-1]}")
    return {result["name"]: result["ours"] for result in json.loads(done.stdout)["results"]}


def ours(page_bytes: int, pages: int) -> Callable[[Rounds], float]:
    def once(rounds: Rounds) -> float:
        found = kvtier(
            "endtoend", "--rounds", 1, "--page-bytes", page_bytes, "--page-tokens", CHUNK_TOKENS,
            "--prompt-tokens", pages * CHUNK_TOKENS, "--prompts", PROMPTS,
        )  # fmt: skip
        rounds.add("store", found["store"])
        rounds.add("retrieve", found["retrieve"])
        few = kvtier("lookup", "--rounds", 1, "--keys", pages, "--pages", 8192, "--clients", 1)
        many = kvtier("lookup", "--rounds", 1, "--keys", LOOKUP_KEYS, "--clients", 1)
        for n, seconds in ((pages, few), (LOOKUP_KEYS, many)):
            asked = seconds[f"roundtrip_{n}"]
            rounds.add(f"lookup_{n}", asked + hashing(n))
            rounds.add(f"lookup_{n}_keys_known", asked)
        return 0.0

    return once


def theirs(peer: LMCache, page_bytes: int, pages: int) -> Callable[[Rounds], float]:
    first = 0

    def once(rounds: Rounds) -> float:
        nonlocal first
        found = peer.measure(page_bytes, pages, first=first, requests=PROMPTS)
        first += PROMPTS
        many = peer.measure(LOOKUP_PAGE_BYTES, LOOKUP_KEYS, first=first, requests=PROMPTS)
        first += PROMPTS
        rounds.add("store", found["store"])
        rounds.add("retrieve", found["retrieve"])
        for n, seconds in ((pages, found["lookup"]), (LOOKUP_KEYS, many["lookup"])):
            rounds.add(f"lookup_{n}", seconds)
            rounds.add(f"lookup_{n}_keys_known", seconds)
        return 0.0

    return once


def hashing(pages: int) -> float:
    """Seconds to hash the tokens of so many pages into keys, the median of a few times."""
    tokens = np.random.default_rng(0).integers(0, 1 << 17, pages * CHUNK_TOKENS, dtype=np.uint32)
    seconds = []
    for _ in range(9):
        begin = time.perf_counter()
        chain_keys(bytes(16), tokens, CHUNK_TOKENS)
        seconds.append(time.perf_counter() - begin)
    return median(seconds)


def figures(mine: Rounds, other: Rounds) -> list[Figure]:
    found = []
    for name, values in mine.values.items():
        speed = not name.startswith("lookup")
        found.append(
            Figure(
                name, Spread.of(values), Spread.of(other.values[name]), BASELINE,
                "GB/s" if speed else "seconds", speed,
            )
        )  # fmt: skip
    return found


def run(page_bytes: int, pages: int, rounds: int) -> list[Figure]:
    mine, other = Rounds(), Rounds()
    folder = Path(tempfile.gettempdir()) / f"kvtier-peers-{os.getpid()}"
    note("starting LMCache")
    with LMCache(folder) as peer:
        note("first-touch pass")
        peer.touch(page_bytes, pages)
        note(f"{rounds} rounds")
        one, two = ours(page_bytes, pages), theirs(peer, page_bytes, pages)
        alternate(rounds, lambda: one(mine), lambda: two(other))
    return figures(mine, other)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench-peers", description=__doc__.splitlines()[0])
    parser.add_argument("--page-bytes", type=int, default=MIB, help="bytes of a page (1048576)")
    parser.add_argument("--pages", type=int, default=32, help="pages of a prompt (32)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of alternating order (5)")
    parser.add_argument("--json", metavar="PATH|-", help="write the result as one JSON object")
    given = parser.parse_args()
    if min(given.pages, given.rounds) < 1 or given.page_bytes < 4096:
        parser.error("write whole numbers of at least 1, and pages of at least 4096 bytes")
    before = machine.load_average()
    try:
        found = run(given.page_bytes, given.pages, given.rounds)
    except PeerError as error:
        note(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        note("interrupted; everything that was started is gone")
        return 130
    answer: dict[str, Any] = {
        "results": [figure.as_json() for figure in found],
        "settings": {k: v for k, v in vars(given).items() if k != "json"},
        "versions": machine.versions() | {"lmcache": LMCACHE_VERSION},
        "machine": machine.machine()
        | {"load_average_before": before, "load_average_after": machine.load_average()},
    }
    for figure in found:
        print("\n".join(figure.as_lines()), file=sys.stderr if given.json == "-" else sys.stdout)
    if given.json == "-":
        print(json.dumps(answer, indent=2))
    elif given.json:
        Path(given.json).write_text(json.dumps(answer, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
