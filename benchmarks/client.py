"""What the cache costs an engine: storing and loading pages through a real agent, and looking up.

One agent process, one client, DRAM only (`--l0 engine`: the engine's pool would be L0), pages that
are put once and got several times. Store and load include what an engine pays: the round trips,
the copy, and the checksum. The baseline is the bare copy of the same bytes by numpy in this
process, between memory that was touched before; a ratio of 1 would mean that the agent is free.
Stores go into a part of the arena that nobody touched before, so the kernel's page faults are in
them.

    make bench                                  a table
    make bench ARGS='--json out.json'           the same for programs, `-` is standard output

JSON: `results[] {name, ratio, ours, baseline, baseline_name, unit}` (a ratio above 1 means that
ours is better; null where there is nothing to compare with), `settings`, `versions`. Figures of a
busy machine are worth little: nothing here is a test.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from agent_process import AgentProcess
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.identity import chain_keys
from kvtier_agent.server.client import Client

MIB = 1 << 20
TOKENS = 256
LOOKUP_KEYS = 1024

POLICY = """
apiVersion: kvtier.io/v1alpha1
kind: KVTierPolicy
metadata: {{name: bench}}
spec:
  tiers: {{hbm: {{size: 64Mi}}, dram: {{size: "{size}"}}}}
  valueDensity: {{model: classic}}
"""


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def result(name: str, ours: float, baseline: float | None, named: str, unit: str) -> dict[str, Any]:
    """``ours`` and ``baseline`` in a unit of which more is better, unless there is no baseline."""
    return {
        "name": name,
        "ratio": None if baseline is None else round(ours / baseline, 4),
        "ours": round(ours, 6),
        "baseline": None if baseline is None else round(baseline, 6),
        "baseline_name": named,
        "unit": unit,
    }


def measure(client: Client, pages: int, batch: int, rounds: int) -> list[dict[str, Any]]:
    """Store, load, look up. Raises SystemExit when a page does not come back right."""
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (batch, client.page_bytes), dtype=np.uint8)
    copy = np.zeros_like(data)
    chains = [
        chain_keys(client.root, rng.integers(0, 1 << 31, batch * TOKENS, dtype=np.uint32), TOKENS)
        for _ in range(pages // batch)
    ]

    def store(keys: Any) -> None:
        if client.put(keys, data).stored != batch:
            raise SystemExit("bench: a page was not taken; give a larger --dram")

    def load(keys: Any) -> None:
        with client.load(keys, deadline_milliseconds=5000) as lease:
            if not lease.copy_to(copy).all():
                raise SystemExit("bench: a page did not come back")

    bytes_a_chain = data.nbytes / 1e9
    put = [bytes_a_chain / timed(lambda k=k: store(k)) for k in chains]
    get = [bytes_a_chain / timed(lambda k=k: load(k)) for _ in range(rounds) for k in chains]
    if not np.array_equal(copy, data):
        raise SystemExit("bench: wrong bytes")
    bare = [bytes_a_chain / timed(lambda: np.copyto(copy, data)) for _ in range(len(get))]
    some = np.concatenate([np.concatenate(chains), rng.integers(0, 256, (LOOKUP_KEYS, 16), "u1")])
    asked = np.ascontiguousarray(some[:LOOKUP_KEYS])
    look = [timed(lambda: client.lookup(asked)) for _ in range(100 * rounds)]
    median = [float(np.median(x)) for x in (put, get, bare)]
    return [
        result("put", median[0], median[2], "numpy copy", "GB/s"),
        result("get", median[1], median[2], "numpy copy", "GB/s"),
        result("roundtrip_1024", float(np.median(look)), None, "", "seconds"),
        result("roundtrip_1024_p99", float(np.quantile(look, 0.99)), None, "", "seconds"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__.splitlines()[0])
    parser.add_argument("--page-mib", type=int, default=2, help="MiB of a page (2)")
    parser.add_argument("--pages", type=int, default=128, help="pages stored (128)")
    parser.add_argument("--batch", type=int, default=16, help="pages of one call (16)")
    parser.add_argument("--rounds", type=int, default=5, help="times that each page is got (5)")
    parser.add_argument("--dram", default="512Mi", help="size of the DRAM tier (512Mi)")
    parser.add_argument("--json", metavar="PATH|-", help="write the result as one JSON object")
    given = parser.parse_args()
    if min(given.page_mib, given.pages, given.batch, given.rounds) < 1 or given.pages < given.batch:
        parser.error("write whole numbers of at least 1, and at least one batch of pages")
    geometry = Geometry.of_page_bytes(given.page_mib * MIB, TOKENS)
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder,
        AgentProcess(
            Path(folder), "--l0", "engine", policy=POLICY.format(size=given.dram)
        ) as agent,
    ):
        agent.ready()
        with Client(agent.socket, geometry, timeout_seconds=10.0) as client:
            if not client.wait_connected(10.0):
                raise SystemExit(f"bench: {client.counters.last_error}")
            results = measure(client, given.pages, given.batch, given.rounds)
        agent.stop()
    for r in results:
        ratio = "" if r["ratio"] is None else f"{r['ratio']:6.2f} of {r['baseline_name']}"
        print(f"{r['name']:<20} {r['ours']:>12.6g} {r['unit']:<8} {ratio}", file=sys.stderr)
    answer = {
        "results": results,
        "settings": {k: v for k, v in vars(given).items() if k != "json"},
        "versions": {
            "kvtier": version("kvtier"),
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
    }
    if given.json == "-":
        print(json.dumps(answer, indent=2))
    elif given.json:
        Path(given.json).write_text(json.dumps(answer, indent=2) + "\n")


if __name__ == "__main__":
    main()
