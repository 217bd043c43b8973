"""`python -m crash`: the full run. `--cuts N` simulated power cuts, `--kills N` real SIGKILLs.

Workloads send their pages by rings and by calls in turn."""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import structlog
from kvtier_agent.storage.volume import filesystem_of

from crash.check import Tally, cut_everywhere, record
from crash.kills import KillTally, kill_run

SHM = Path("/dev/shm")


def main() -> int:
    parser = argparse.ArgumentParser(prog="crash", description=__doc__)
    parser.add_argument("--cuts", type=int, default=10_000, help="power cuts, at least (10000)")
    parser.add_argument("--kills", type=int, default=200, help="SIGKILLs of an agent (200)")
    parser.add_argument("--seed", type=int, default=1, help="of all chance (1)")
    parser.add_argument("--folder", type=Path, help="a real file system for the kills (/tmp)")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.gettempdir())
    if options.kills and (kind := filesystem_of(folder)[1]) in ("tmpfs", "ramfs"):
        parser.error(
            f"{folder} is memory ({kind}), which shows nothing: name a --folder on a drive"
        )
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    bad = 0
    if options.cuts:
        bad += _cuts(options.cuts, options.seed)
    if options.kills:
        with tempfile.TemporaryDirectory(prefix="kvtier-kills-", dir=options.folder) as folder:
            tally = KillTally()
            kill_run(Path(folder), options.kills, options.seed, tally, progress=_say)
        bad += _report("kills", tally, tally.bad)
    return 1 if bad else 0


def _cuts(cuts: int, seed: int) -> int:
    tally, begun = Tally(), time.monotonic()
    while tally.cuts < cuts:
        with (
            tempfile.TemporaryDirectory(prefix="kvtier-work-", dir=SHM) as work,
            tempfile.TemporaryDirectory(prefix="kvtier-cut-", dir=SHM) as cut,
        ):
            (Path(cut) / "data0").mkdir()
            trace = record(Path(work), seed, 200, rings=seed % 2 == 0)
            cut_everywhere(trace, Path(cut), seed, tally)
        _say(f"seed {seed}: {tally.cuts} cuts, {time.monotonic() - begun:.0f} s")
        seed += 1
    return _report("power cuts", tally, tally.bad)


def _report(what: str, tally: Tally | KillTally, bad: int) -> int:
    figures = asdict(tally)
    problems = figures.pop("problems")
    print(f"{what}: " + ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in figures.items()))
    for problem in problems:
        print(f"  {problem}")
    return bad


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
