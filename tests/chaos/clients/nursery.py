"""Clients to be killed: each line on standard input forks one, its pid is the answer.

``put SEED``: reserves pages and fills them slowly, for ever. ``load SEED``: loads pages and holds
them, copying, for ever. ``both SEED``: one after the other. A client is in the middle of it when
its pid is written.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.server.client import Client

PAGES = 12


def put(client: Client, rng: np.random.Generator) -> None:
    keys = rng.integers(0, 256, (PAGES, 16), dtype=np.uint8)
    page = rng.integers(0, 256, client.page_bytes, dtype=np.uint8)

    def slowly(i: int, destination: np.ndarray) -> None:
        destination[:] = page
        time.sleep(0.002)

    client.put(keys, slowly)


def load(client: Client, keys: np.ndarray) -> None:
    out = np.zeros((len(keys), client.page_bytes), np.uint8)
    with client.load(keys, deadline_milliseconds=200) as lease:
        lease.copy_to(out)
        time.sleep(0.005)


def live(socket: Path, kind: str, seed: int, page_bytes: int, keys: np.ndarray) -> None:
    rng = np.random.default_rng(seed)
    client = Client(socket, Geometry.of_page_bytes(page_bytes, 16), timeout_seconds=5)
    print(os.getpid() if client.connected else 0, flush=True)
    while True:
        if kind in ("put", "both"):
            put(client, rng)
        if kind in ("load", "both"):
            start = int(rng.integers(0, max(1, len(keys) - PAGES)))
            load(client, keys[start : start + PAGES])


def main() -> None:
    socket, page_bytes, keys_file = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    keys = np.fromfile(keys_file, np.uint8).reshape(-1, 16)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        kind, seed = line.split()
        if os.fork() == 0:
            live(socket, kind, int(seed), page_bytes, keys)


if __name__ == "__main__":
    main()
