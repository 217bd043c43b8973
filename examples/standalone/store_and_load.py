"""Store four pages, load them back, and check every byte: what an engine does with an agent.

python store_and_load.py /tmp/kvtier-demo/run/default.sock
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.identity import chain_keys
from kvtier_agent.server.client import Client

PAGES = 4


def main(socket: Path) -> int:
    # A small model: 2 x 4 layers x 2 KV heads x 64 x 2 bytes = 2 KiB a token, 512 KiB a page.
    geometry = Geometry(layers=4, kv_heads=2, head_size=64, dtype_bytes=2, page_tokens=256)
    with Client(socket, geometry, timeout_seconds=5.0) as cache:
        if not cache.wait_connected(10.0):
            print(f"no agent answers on {socket}", file=sys.stderr)
            return 1
        # A prompt is a chain of pages; a page's key depends on every token before it.
        tokens = np.arange(PAGES * geometry.page_tokens, dtype=np.uint32)
        keys = chain_keys(cache.root, tokens, geometry.page_tokens)
        pages = np.random.default_rng(7).integers(
            0, 256, (PAGES, geometry.page_bytes), dtype=np.uint8
        )
        print("stored:", cache.put(keys, pages).stored, "of", PAGES)
        found = cache.lookup(keys)
        print("found in tiers:", found.tiers.tolist(), "- worth loading:", found.load)
        copy = np.zeros_like(pages)
        with cache.load(keys) as lease:
            good = lease.copy_to(copy)
        same = bool(good.all() and np.array_equal(copy, pages))
        print("loaded and verified:", int(good.sum()), "- every byte the same:", same)
        return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
