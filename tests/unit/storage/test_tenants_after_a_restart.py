"""Whose pages are in DRAM and on NVMe is known to the next agent as well: quotas go on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xxhash
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.quotas import tenant_number
from kvtier_agent.cache.results import PutStatus
from kvtier_agent.cache.segment_sizes import bytes_for
from kvtier_agent.cache.settings import Behaviour, Budgets, CacheSettings, TenantQuota
from kvtier_agent.cache.snapshot import check_books
from kvtier_agent.storage.core import Core, CoreSettings
from kvtier_agent.storage.journal_format import EVENT, puts
from kvtier_agent.storage.segment import PageStamp

PAGE = 4096
GEOMETRY = Geometry.of_page_bytes(PAGE, 16)
SEARCH, CHAT = tenant_number("search"), tenant_number("chat")
QUOTA = Behaviour(
    cool_down_seconds=0, quotas=(TenantQuota("search", dram_percent=50, nvme_percent=50),)
)


def start(folder: Path, slots: int = 160) -> Core:
    core = Core(
        CoreSettings(
            domain="d", arena_folder=folder, table_path=folder / "d.table",
            volumes={"data0": folder / "data0"}, maximum_l0_bytes=16 * PAGE,
            maximum_l1_bytes=64 * PAGE, allow_root_filesystem=True, synchronous=True,
            cache=CacheSettings(max_pages=4096),
        )
    )  # fmt: skip
    nvme = bytes_for(slots, GEOMETRY.nvme_slot_bytes) + 65536
    core.reconfigure(1.0, QUOTA, Budgets(0, 32 * PAGE, nvme, ("data0",), 0))
    assert core.register(1.0, GEOMETRY).accepted
    return core


def settle(core: Core) -> None:
    core.pump()
    while core._mover._done:
        core.collect(1.0)
        core.pump()


def put(core: Core, seed: int, count: int, tenant: int) -> None:
    keys = np.random.default_rng(seed).integers(0, 256, (count, 16), dtype=np.uint8)
    for first in range(0, count, 4):
        some = keys[first : first + 4]
        result = core.cache.reserve(1.0, 1, some, tenant=tenant)
        offered = np.flatnonzero(result.status == PutStatus.OFFERED)
        for i in offered:
            core.l1.rows(PAGE)[int(result.offset[i]) // PAGE][:] = some[i].tobytes()[0]
        sums = [xxhash.xxh3_64_intdigest(some[i].tobytes()[:1] * PAGE) for i in offered]
        core.cache.commit(1.0, 1, some[offered], np.array(sums, dtype=np.uint64))
        settle(core)


@pytest.mark.parametrize("memory", ["kept", "lost"])
def test_pages_found_after_a_restart_count_for_their_tenants(tmp_path: Path, memory: str) -> None:
    (tmp_path / "data0").mkdir()
    core = start(tmp_path)
    put(core, 1, 120, SEARCH)
    put(core, 2, 60, CHAT)
    before = [core.cache.shelves.quotas.use[tier].copy() for tier in (1, 2)]
    assert before[1][SEARCH] > 30
    assert before[1][CHAT] > 10
    core.close()
    if memory == "lost":
        for path in tmp_path.glob("*"):
            if path.is_file():
                path.unlink()
    core = start(tmp_path)
    try:
        check_books(core.cache)
        use = core.cache.shelves.quotas.use
        assert use[2][[SEARCH, CHAT]].tolist() == before[1][[SEARCH, CHAT]].tolist()
        kept = before[0][[SEARCH, CHAT]].tolist() if memory == "kept" else [0, 0]
        assert use[1][[SEARCH, CHAT]].tolist() == kept
        put(core, 3, 120, SEARCH)
        check_books(core.cache)
        limit = core.cache.shelves.quotas.shares[SEARCH].limits[2]
        assert use[2][SEARCH] <= limit
        assert core.cache.counters.quota_evicted > 0
    finally:
        core.close()


def test_an_event_says_whose_page_it_is_where_earlier_versions_wrote_zeros() -> None:
    assert EVENT.itemsize == 64
    keys, slots = np.ones((2, 16), np.uint8), np.arange(2, dtype=np.uint32)
    sums = np.zeros(2, np.uint64)
    nobody = puts(slots, slots, PageStamp(keys, keys, slots, sums), 1)
    assert nobody["tenant"].tolist() == [0, 0]
    tenants = np.array([7, 65535], np.uint16)
    stamp = PageStamp(keys, keys, slots, sums, tenants)
    assert puts(slots, slots, stamp, 1)["tenant"].tolist() == [7, 65535]
    assert puts(slots[:1], slots[:1], stamp.some(slots[1:]), 1)["tenant"].tolist() == [65535]
    assert EVENT.fields is not None
    assert [EVENT.fields[name][1] for name in ("kind", "tenant", "slot")] == [0, 2, 4]
