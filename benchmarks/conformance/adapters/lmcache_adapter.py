"""LMCache's storage manager, the part of its multi-process server that keeps pages, with its native
file system backend below: DRAM write-through to files, LRU in both.

Clients that are killed are real ones of a real server (`lmcache_clients.py`).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import asyncio

import torch
from common import PAGE_BYTES, PATIENCE_SECONDS, Adapter, content, digest, serve, sort_out
from lmcache.v1.distributed import api
from lmcache.v1.distributed.config import (
    add_storage_manager_args,
    parse_args_to_config,
)
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.multiprocess.http_apis.info_api import healthcheck

LAYOUT = api.MemoryLayoutDesc(
    shapes=[torch.Size([2, 1, 256, PAGE_BYTES // (2 * 256 * 2)])], dtypes=[torch.float16]
)
WAIT_SECONDS = 20.0
STILL_SECONDS = 1.5


def key_of(number: int) -> Any:
    return api.ObjectKey(chunk_hash=digest(number), model_name="m", kv_rank=0)


class LMCache(Adapter):
    """A page at a time, as its benchmark's adapter test does it."""

    def open(self, folder: Path, memory: Path, dram_pages: int, disk_pages: int) -> dict[str, Any]:
        self.files = folder / "fs"
        adapter = {
            "type": "fs_native", "base_path": str(self.files),
            "max_capacity_gb": disk_pages * PAGE_BYTES / 1024**3,
            "eviction": {
                "eviction_policy": "LRU", "trigger_watermark": 0.8, "eviction_ratio": 0.2
            },
        }  # fmt: skip
        parser = argparse.ArgumentParser()
        add_storage_manager_args(parser)
        words = [
            *("--l1-size-gb", str(dram_pages * PAGE_BYTES / 1024**3), "--no-l1-use-lazy"),
            *("--eviction-policy", "LRU", "--l2-adapter", json.dumps(adapter)),
        ]
        self.manager = StorageManager(parse_args_to_config(parser.parse_args(words)))
        return {}

    def put(self, first: int, count: int) -> dict[str, Any]:
        stored = []
        for number in range(first, first + count):
            end = time.monotonic() + PATIENCE_SECONDS
            while True:
                reserved = self.manager.reserve_write([key_of(number)], LAYOUT)
                if reserved or time.monotonic() > end:
                    break
                time.sleep(0.1)
            for page in reserved.values():
                self._bytes(page)[:] = torch.from_numpy(content(number))
                stored.append(number)
            if reserved:
                self.manager.finish_write(list(reserved))
        return {"stored": stored}

    @staticmethod
    def _bytes(page: Any) -> Any:
        return page.tensor.flatten().view(torch.uint8)

    def get(self, numbers: list[int]) -> dict[str, Any]:
        return sort_out(self._read, numbers)

    def _read(self, number: int) -> bytes | None:
        keys = [key_of(number)]
        spec = api.PrefetchTaskSpec(
            key_groups=[api.GroupedObjectKeys(keys=keys, object_group_id=0, layout_desc=LAYOUT)]
        )
        handle = self.manager.submit_prefetch_task(spec)
        self.manager.wait_prefetch_status(handle, WAIT_SECONDS)
        result = self.manager.query_prefetch_status(handle)
        if result is None or not result.hit_cells or not result.hit_cells[0].popcount():
            return None
        with self.manager.read_prefetched_results(keys) as pages:
            found = self._bytes(pages[0]).numpy().tobytes() if pages else None
        if found is not None:
            self.manager.finish_read_prefetched(keys)
        return found

    def settle(self) -> dict[str, Any]:
        """Its writes are behind the caller's back: until the files do not change any more."""
        before, since = -1, time.monotonic()
        end = since + 60
        while time.monotonic() < min(end, since + STILL_SECONDS):
            now = sum(p.stat().st_blocks for p in self.files.rglob("*") if p.is_file())
            if now != before:
                before, since = now, time.monotonic()
            time.sleep(0.2)
        return {}

    def kill_eviction(self) -> dict[str, Any]:
        (controller,) = self.manager._eviction_controllers
        thread = controller._thread
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(RuntimeError)
        )
        thread.join(10)
        return {"what": "an exception was raised in the thread of L1EvictionController"}

    def health(self) -> dict[str, Any]:
        """The code of `/healthcheck`, its liveness and readiness probe; `/status` besides."""
        app = SimpleNamespace(state=SimpleNamespace(engine=self.manager))
        says = asyncio.run(healthcheck(SimpleNamespace(app=app)))
        healthy = isinstance(says, dict) and says.get("status") == "healthy"
        status = self.manager.report_status()["is_healthy"]
        return {
            "healthy": healthy,
            "says": f"/healthcheck: {'healthy' if healthy else 'unhealthy'};"
            f" /status: is_healthy {status}",
        }

    def kill_clients(self, times: int, first: int, count: int) -> dict[str, Any]:
        from lmcache_clients import kill_clients

        return kill_clients(times, count)

    def close(self) -> dict[str, Any]:
        self.manager.close()
        return {}


if __name__ == "__main__":
    serve(LMCache())
