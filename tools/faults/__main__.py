"""`python -m faults`: a whole trace over a drive that fails, with calls that take 30 s."""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections import Counter
from pathlib import Path

import structlog
from kvtier_agent.replay.sessions import SessionSettings, SessionTraffic
from kvtier_agent.replay.trace import Trace, read_trace
from ring_faults import why_no_ring

from faults.drive import Chances, FailingDrive
from faults.rings import FailingRings
from faults.run import WHOLE, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="faults", description=__doc__)
    parser.add_argument("trace", nargs="?", type=Path, help="a trace (generated sessions)")
    parser.add_argument("--limit", type=int, help="requests (all)")
    parser.add_argument("--seed", type=int, default=1, help="of all chance (1)")
    parser.add_argument("--fault", type=float, default=0.05, help="chance of a fault a call (0.05)")
    parser.add_argument("--slow-seconds", type=float, default=30.0, help="of a slow call (30)")
    parser.add_argument("--most-slow", type=int, default=4, help="slow calls at most (4)")
    parser.add_argument("--least", type=int, default=200, help="faults; replayed until then (200)")
    parser.add_argument("--folder", type=Path, help="a real file system for the volume (/tmp)")
    parser.add_argument("--calls", action="store_true", help="no io_uring (used where there is)")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    if options.trace is None:
        traffic = SessionTraffic(SessionSettings(seed=options.seed))
        trace = Trace(requests=list(traffic.requests(count=options.limit or 3000)))
    else:
        trace = read_trace(options.trace, limit=options.limit)
    chances = Chances(
        fault=options.fault, slow_seconds=options.slow_seconds, most_slow=options.most_slow
    )
    with tempfile.TemporaryDirectory(prefix="kvt-", dir=options.folder) as folder:
        kind = FailingDrive if options.calls or why_no_ring() else FailingRings
        seen = run(trace, Path(folder), options.seed, chances, WHOLE, options.least, kind)
    kinds: Counter[str] = Counter()
    for (_, fault), count in seen.injected.items():
        kinds[fault] += count
    requests = sum(report.requests for report in seen.during)
    seconds = sum(report.seconds for report in seen.during)
    hits = [sum(getattr(r.whole, tier) for r in seen.during) for tier in ("l0", "l1", "l2", "miss")]
    print(
        f"{requests} requests, {seconds:.0f} s, hits l0 {hits[0]}, l1 {hits[1]}, l2 {hits[2]},"
        f" misses {hits[3]};"
        f" pages by {'rings' if kind is FailingRings else 'calls'}, {seen.late} transfers late;"
        f" {sum(kinds.values())} faults: " + ", ".join(f"{n} {k}" for k, n in sorted(kinds.items()))
    )
    problems = seen.problems()
    print("\n".join(problems) or "no wrong byte, no failed request, every fault counted once")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
