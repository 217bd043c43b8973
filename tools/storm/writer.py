"""`python writer.py SOCKET PAGE_BYTES BYTES_PER_SECOND SEED`: stores new pages at a pace, for ever.

A page that is refused is as good as stored: an engine goes on, too. One JSON line says when the
first batch is in; it ends with its parent.
"""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.server.client import Client

BATCH_BYTES = 2 << 20


def write(path: str, page_bytes: int, bytes_per_second: float, seed: int) -> None:
    mother = os.getppid()
    rng = np.random.default_rng(seed)
    count = max(1, BATCH_BYTES // page_bytes)
    pages = rng.integers(0, 256, (count, page_bytes), dtype=np.uint8)
    geometry = Geometry.of_page_bytes(page_bytes, 16)
    with Client(path, geometry, timeout_seconds=10.0, name=f"writer-{seed}") as client:
        assert client.wait_connected(30.0)
        begin, sent = time.monotonic(), 0
        while os.getppid() == mother:
            client.put(rng.integers(0, 256, (count, 16), dtype=np.uint8), pages)
            if not sent:
                print(json.dumps({"ready": True}), flush=True)
            sent += count * page_bytes
            time.sleep(max(0.0, begin + sent / bytes_per_second - time.monotonic()))


if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
