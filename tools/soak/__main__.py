"""`python -m soak`: random steps of the cache's state machine, then a real agent under replay."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from pathlib import Path

import structlog

from soak.machine import drive
from soak.process import MIB, soak

STEPS_OF_A_LIFE = 2000


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000, help="of the state machine (100000)")
    parser.add_argument("--minutes", type=float, default=30.0, help="of the real agent (30)")
    parser.add_argument("--seed", type=int, default=1, help="of all chance (1)")
    parser.add_argument("--speed", type=float, default=40.0, help="trace seconds a second (40)")
    options = parser.parse_args()
    if options.steps < 0 or options.minutes < 0 or options.speed <= 0:
        parser.error("write steps and minutes of at least 0, and a speed above 0")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    note(f"load average {os.getloadavg()[0]:.2f}")
    bad = 0
    if options.steps:
        machine(options.steps, options.seed)
    if options.minutes:
        bad = process(options.minutes * 60, options.seed, options.speed)
    return 1 if bad else 0


def machine(steps: int, seed: int) -> None:
    """Raises AssertionError at the first step after which something is wrong."""
    begin, done = time.monotonic(), 0
    committed = restarts = 0
    while done < steps:
        here = min(STEPS_OF_A_LIFE, steps - done)
        total = drive(seed, here)
        committed += total["committed"]
        restarts += total["restarts"]
        done, seed = done + here, seed + 1
        if done % (10 * STEPS_OF_A_LIFE) == 0:
            note(f"{done} steps, {time.monotonic() - begin:.0f} s")
    print(
        f"state machine: {done} steps, {restarts} restarts, {committed} pages stored;"
        " no wrong byte, nothing leaked"
    )


def process(seconds: float, seed: int, speed: float) -> int:
    with tempfile.TemporaryDirectory(prefix="kvtier-soak-") as folder:
        seen = soak(Path(folder), seconds, seed, speed, say=note)
    first, last = seen.windows()
    print(
        f"agent: {seconds:.0f} s, {seen.requests} requests, {seen.hits} pages hit,"
        f" {seen.killed_clients} clients killed; resident memory {last[-1].resident / MIB:.1f} MiB,"
        f" of it its own {last[-1].own / MIB:.1f},"
        f" drift {seen.drift:+.2%}; descriptors {max(x.descriptors for x in first)} ->"
        f" {max(x.descriptors for x in last)}"
    )
    print("\n".join(seen.problems) or "nothing is held at rest")
    return len(seen.problems)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
