"""`python -m storm`: writers at four times what the drive takes, for a minute."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from ring_faults import why_no_ring

from storm.run import Weather, storm


def main() -> int:
    parser = argparse.ArgumentParser(prog="storm", description=__doc__)
    parser.add_argument("--drive", type=float, default=200e6, help="bytes a second (200e6)")
    parser.add_argument("--times", type=float, default=4.0, help="what is written to it (4)")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (60)")
    parser.add_argument("--folder", type=Path, help="a file system for the volume (/tmp)")
    options = parser.parse_args()
    if min(options.drive, options.times, options.seconds) <= 0:
        parser.error("write figures above 0")
    load = os.getloadavg()[0]
    weather = replace(Weather(), drive=options.drive, times=options.times, seconds=options.seconds)
    with tempfile.TemporaryDirectory(prefix="kvt-", dir=options.folder) as folder:
        seen = storm(Path(folder), weather)
    idle, during = seen.p99s
    way = "calls" if why_no_ring() else "rings"
    print(
        f"load average {load:.2f}; pages go by {way}; {seen.times:.2f} times what the drive takes"
        f" was sent, {seen.counters['committed']} pages stored,"
        f" {seen.written_bytes / 1e9:.1f} GB to NVMe, {seen.evicted} evicted"
        f" ({seen.counters['emergency_evicted']} at once); DRAM at most {max(seen.dram):.1%} of its"
        f" limit, its own memory {min(seen.own) >> 20} to {max(seen.own) >> 20} MiB;"
        f" lookup p99 idle {1000 * idle:.2f} ms, in the storm {1000 * during:.2f} ms"
    )
    if during >= 10 * idle:
        seen.problems.append(f"lookups took {during / idle:.1f} times as long as idle")
    print("\n".join(seen.problems) or "DRAM kept its limit, every page is accounted for")
    return 1 if seen.problems else 0


if __name__ == "__main__":
    sys.exit(main())
