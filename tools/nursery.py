"""Clients to be killed: made from a process that can fork, held by `Nursery`.

The program: each line on standard input forks a client, its pid is the answer. ``put SEED``:
reserves pages and fills them slowly, for ever. ``load SEED``: pins pages, loads them and holds
them, copying, for ever. ``both SEED``: one after the other. A client is in the middle of it when
its pid is written.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Self

import numpy as np
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.server.client import Client

PAGES = 12


class Nursery:
    """Makes clients that can be killed. ``keys``: a file with keys (n, 16) of pages to load."""

    def __init__(self, socket: Path, geometry: Geometry, keys: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(socket), json.dumps(asdict(geometry)), str(keys)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def birth(self, kind: str, seed: int) -> int:
        """The pid of a new client."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{kind} {seed}\n")
        self.process.stdin.flush()
        pid = int(self.process.stdout.readline())
        assert pid, "the client found no agent"
        return pid

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def put(client: Client, rng: np.random.Generator) -> None:
    keys = rng.integers(0, 256, (PAGES, 16), dtype=np.uint8)
    page = rng.integers(0, 256, client.page_bytes, dtype=np.uint8)

    def slowly(i: int, destination: np.ndarray) -> None:
        destination[:] = page
        time.sleep(0.002)

    client.put(keys, slowly)


def load(client: Client, keys: np.ndarray) -> None:
    out = np.zeros((len(keys), client.page_bytes), np.uint8)
    client.pin(keys[::2])
    with client.load(keys, deadline_milliseconds=200) as lease:
        lease.copy_to(out)
        time.sleep(0.005)


def live(socket: Path, kind: str, seed: int, geometry: Geometry, keys: np.ndarray) -> None:
    mother = os.getppid()
    rng = np.random.default_rng(seed)
    client = Client(socket, geometry, timeout_seconds=5)
    print(os.getpid() if client.connected else 0, flush=True)
    while os.getppid() == mother:  # nobody is left to kill it otherwise
        if kind in ("put", "both"):
            put(client, rng)
        if kind in ("load", "both"):
            start = int(rng.integers(0, max(1, len(keys) - PAGES)))
            load(client, keys[start : start + PAGES])


def main() -> None:
    socket, geometry = Path(sys.argv[1]), Geometry(**json.loads(sys.argv[2]))
    keys = np.fromfile(sys.argv[3], np.uint8).reshape(-1, 16)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        kind, seed = line.split()
        if os.fork() == 0:
            live(socket, kind, int(seed), geometry, keys)
            os._exit(0)


if __name__ == "__main__":
    main()
