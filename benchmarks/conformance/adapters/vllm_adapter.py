"""vLLM's CPU offloading with its file system tier below, driven as its scheduler drives it.

The tier lives in the engine's own process, so a client that dies mid-store is that process: the
behaviour kills the adapter. DRAM is a plain buffer where vLLM has one that it shares with workers.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from common import PAGE_BYTES, PATIENCE_SECONDS, Adapter, content, digest, serve, sort_out

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

WAIT_SECONDS = 20.0
STEP_SECONDS = 0.002


class Region:
    """Stands for the region that the scheduler shares with its workers."""

    def __init__(self, pages: int) -> None:
        self.memory = mmap.mmap(-1, pages * PAGE_BYTES)
        self.view = memoryview(self.memory).cast("b", (pages, PAGE_BYTES))

    def create_kv_memoryview(self) -> memoryview:
        return self.view

    def cleanup(self) -> None:
        pass


def spec() -> Any:
    """What the file mapper asks of the engine's configuration."""
    group = SimpleNamespace(tokens_per_block=256, layer_names=["layer"])
    parallel = SimpleNamespace(
        tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=True
    )
    config = SimpleNamespace(
        groups=[group], parallel=parallel, canonical_layout=False, replicated_layout=False,
        model=SimpleNamespace(name="conformance", dtype="float16"),
        cache=SimpleNamespace(tokens_per_hash=256), kv_cache_layout=None,
    )  # fmt: skip
    return SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=None)


class Vllm(Adapter):
    """One request per page."""

    requests = 0

    def open(self, folder: Path, memory: Path, dram_pages: int, disk_pages: int) -> dict[str, Any]:
        self.region = Region(dram_pages)
        primary = CPUPrimaryTierOffloadingManager(num_chunks=dram_pages, mmap_region=self.region)
        self.tier = FileSystemTierManager(
            offloading_spec=spec(), primary_kv_view=primary.get_kv_memoryview(), tier_type="fs",
            root_dir=str(folder / "fs"),
        )  # fmt: skip
        self.manager = TieringOffloadingManager(primary, [self.tier])
        self.rows = np.asarray(self.region.view).view(np.uint8)
        return {"nothing": "the fs tier has no setting for a cap"}

    def _request(self) -> ReqContext:
        self.requests += 1
        context = ReqContext(req_id=str(self.requests))
        self.manager.on_new_request(context)
        return context

    def _step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def put(self, first: int, count: int) -> dict[str, Any]:
        stored = []
        for number in range(first, first + count):
            context, key = self._request(), make_offload_key(digest(number), 0)
            end = time.monotonic() + PATIENCE_SECONDS
            while (out := self.manager.prepare_store([key], context)) is None:
                self._step()
                if time.monotonic() > end:
                    break
                time.sleep(STEP_SECONDS)
            if out is not None:
                for chunk in out.store_spec.chunk_ids:
                    self.rows[int(chunk)] = content(number)
                if out.keys_to_store:
                    self.manager.complete_store(out.keys_to_store, context, True)
                stored.append(number)
            self.manager.on_request_finished(context)
            self._step()
        return {"stored": stored}

    def get(self, numbers: list[int]) -> dict[str, Any]:
        return sort_out(self._read, numbers)

    def _read(self, number: int) -> bytes | None:
        context, key = self._request(), make_offload_key(digest(number), 0)
        try:
            end = time.monotonic() + WAIT_SECONDS
            while (found := self.manager.lookup(key, context)) is not LookupResult.HIT:
                if found is LookupResult.MISS or time.monotonic() > end:
                    return None
                self._step()
                time.sleep(STEP_SECONDS)
            chunk = int(self.manager.prepare_load([key], context).chunk_ids[0])
            page = self.rows[chunk].tobytes()
            self.manager.complete_load([key], context)
            return page
        finally:
            self.manager.on_request_finished(context)
            self._step()

    def settle(self) -> dict[str, Any]:
        self.tier.drain_jobs()
        self._step()
        return {}

    def kill_eviction(self) -> dict[str, Any]:
        return {"nothing": "room is made inside the store call, by no thread"}

    def health(self) -> dict[str, Any]:
        return {"nothing": "the tier is in the engine's process"}

    def kill_clients(self, times: int, first: int, count: int) -> dict[str, Any]:
        return {"nothing": "its client is the engine's own process", "kill_me": True}

    def close(self) -> dict[str, Any]:
        self.settle()
        self.tier.shutdown()
        return {}


if __name__ == "__main__":
    serve(Vllm())
