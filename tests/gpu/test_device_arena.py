"""L0 in device memory: the same core with `device: cuda`, and a client in another process."""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import xxhash
from kvtier_agent.cache.arena import open_device_arena
from kvtier_agent.cache.arena_cuda import CudaArena
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.results import MISS
from kvtier_agent.cache.settings import Behaviour, Budgets
from kvtier_agent.storage.core import ArenaInfo, Core, CoreSettings

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PAGE = 64 << 10


def test_what_is_scattered_is_gathered():
    arena = CudaArena("cuda", 1 << 30, PAGE)
    slots = np.array([0, 5, arena.chunk_slots, arena.chunk_slots + 3], dtype=np.uint32)
    arena.back_slots(slots, PAGE)
    assert len(arena.chunks) == 2
    rows = np.random.default_rng(1).integers(0, 256, (4, PAGE), dtype=np.uint8)
    arena.scatter(slots, rows)
    back = np.zeros_like(rows)
    arena.gather(slots[::-1], back)
    assert (back[::-1] == rows).all()


def test_pages_go_down_and_come_up_byte_for_byte():
    geometry = Geometry.of_page_bytes(PAGE, 16)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder)
        core = Core(
            CoreSettings("d", path, path / "t", {}, 1 << 30, 64 * PAGE, "cuda", synchronous=True)
        )
        core.reconfigure(0.0, Behaviour(cool_down_seconds=0), Budgets(8 * PAGE, 40 * PAGE))
        assert core.register(0.0, geometry).accepted
        keys = np.random.default_rng(2).integers(0, 256, (24, 16), dtype=np.uint8)
        for start in range(0, 24, 3):
            some = keys[start : start + 3]
            result = core.cache.reserve(1.0, 1, some)
            sums = []
            for i, key in enumerate(some):
                page = np.tile(key, PAGE // 16)
                slot = np.array([int(result.offset[i]) // PAGE], dtype=np.uint32)
                if result.tier[i] == 0:
                    core._l0.scatter(slot, page[None])
                else:
                    core._l1.rows(PAGE)[slot[0]] = page
                sums.append(xxhash.xxh3_64_intdigest(page))
            core.cache.commit(1.0, 1, some, np.array(sums, dtype=np.uint64))
            core.pump()
            core.collect(1.0)
        tiers = core.cache.lookup(keys).tiers
        assert {0, 1} <= set(tiers.tolist())
        for key, tier in zip(keys, tiers, strict=True):
            if tier == MISS:
                continue
            ticket = core.cache.load(2.0, 1, key[None], 3.0)
            page = np.zeros((1, PAGE), dtype=np.uint8)
            slot = np.array([int(ticket.offset[0]) // PAGE], dtype=np.uint32)
            if ticket.arena[0] == 0:
                core._l0.gather(slot, page)
            else:
                page[0] = core._l1.rows(PAGE)[slot[0]]
            assert (page[0] == np.tile(key, PAGE // 16)).all()
            core.cache.release(2.0, 1, ticket.lease)
        core.close()


def test_another_process_reads_the_arena_by_its_handle():
    arena = CudaArena("cuda", 1 << 30, PAGE)
    slot = np.array([3], dtype=np.uint32)
    arena.back_slots(slot, PAGE)
    page = np.random.default_rng(5).integers(0, 256, (1, PAGE), dtype=np.uint8)
    arena.scatter(slot, page)
    (handle,) = arena.handles()
    child = (
        "import sys, xxhash\n"
        "from kvtier_agent.cache.arena import open_device_arena\n"
        "from kvtier_agent.storage.core import ArenaInfo\n"
        f"info = ArenaInfo(0, 'cuda', '', {arena.size_bytes}, {arena.chunk_bytes},\n"
        "    (bytes.fromhex(sys.stdin.read()),))\n"
        f"page = open_device_arena(info)[3 * {PAGE} : 4 * {PAGE}].cpu().numpy()\n"
        "print(xxhash.xxh3_64_intdigest(page))\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", child], input=handle.hex(), capture_output=True, text=True,
        check=True,
    ).stdout  # fmt: skip
    assert int(out) == xxhash.xxh3_64_intdigest(page[0])


def test_bytes_outside_every_chunk_are_refused():
    with pytest.raises(IndexError, match="no chunk"):
        open_device_arena(ArenaInfo(0, "cuda", "", 1 << 30, 1 << 28, ()))[0:PAGE]
