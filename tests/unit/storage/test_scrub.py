"""The scrub of pages that were taken over: what it finds, and what it must not call bad."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.results import MISS
from kvtier_agent.cache.settings import Behaviour, Budgets, CacheSettings
from kvtier_agent.cache.snapshot import check_books
from kvtier_agent.storage import scrub as scrub_module
from kvtier_agent.storage.core import Core, CoreSettings
from kvtier_agent.storage.scrub import Scrub
from kvtier_agent.supervise import Heart

PAGE = 4096
COUNT = 50
GEOMETRY = Geometry.of_page_bytes(PAGE, 16)
KEYS = np.random.default_rng(7).integers(0, 256, (COUNT, 16), dtype=np.uint8)
BYTES = np.random.default_rng(8).integers(0, 256, (COUNT, PAGE), dtype=np.uint8)
SUMS = np.array([xxhash.xxh3_64_intdigest(page) for page in BYTES], dtype=np.uint64)


def agent(folder: Path) -> Core:
    core = Core(
        CoreSettings(
            "d", folder, folder / "d.table", {}, 64 * PAGE, 64 * PAGE, synchronous=True,
            cache=CacheSettings(max_pages=4096),
        )
    )  # fmt: skip
    core.reconfigure(1.0, Behaviour(), Budgets(0, 60 * PAGE, 0))
    return core


@pytest.fixture
def core(tmp_path: Path) -> Iterator[Core]:
    """An agent that has taken over COUNT pages."""
    first = agent(tmp_path)
    first.register(1.0, GEOMETRY)
    offset = first.cache.reserve(1.0, 1, KEYS).offset
    for start, page in zip(offset.tolist(), BYTES, strict=True):
        first.l1.bytes[start : start + PAGE] = page
    first.cache.commit(1.0, 1, KEYS, SUMS)
    assert first.close()
    second = agent(tmp_path)
    assert second.memory.restart.taken_over == COUNT
    yield second
    second.close()


def now(call: Callable[[], Any]) -> None:
    call()


def damage(core: Core, i: int) -> None:
    slot = int(core.table.l1_slot[core.table.lookup(KEYS[i : i + 1])[0]])
    core.l1.bytes[slot * PAGE + 9] ^= 1


def there(core: Core) -> int:
    return int((core.cache.lookup(KEYS).tiers != MISS).sum())


def finish(scrub: Scrub) -> None:
    while scrub.left:
        scrub.step()


def test_good_pages_stay(core: Core) -> None:
    finish(Scrub(core, now, percent=100))
    assert (core.cache.counters.scrubbed_pages, core.cache.counters.scrub_bad_pages) == (COUNT, 0)
    assert there(core) == COUNT


def test_damaged_pages_go_and_are_counted(core: Core) -> None:
    for i in (3, 4, 40):
        damage(core, i)
    finish(Scrub(core, now, percent=100))
    counters = core.cache.counters
    assert (counters.scrubbed_pages, counters.scrub_bad_pages) == (COUNT, 3)
    assert counters.quarantined_pages == 3
    assert there(core) == COUNT - 3
    check_books(core.cache)


def test_a_damaged_page_that_is_leased_goes_when_it_is_released(core: Core) -> None:
    damage(core, 3)
    ticket = core.cache.load(1.0, 1, KEYS[:10], 1e9)
    finish(Scrub(core, now, percent=100))
    assert there(core) == COUNT - 1
    check_books(core.cache)
    core.cache.release(1.0, 1, ticket.lease)
    check_books(core.cache)
    assert core.cache.snapshot(1.0).pages == COUNT - 1


def test_a_page_that_changed_between_reading_and_telling_is_not_called_bad(core: Core) -> None:
    late: list[Callable[[], Any]] = []
    damage(core, 3)
    scrub = Scrub(core, late.append, percent=100)
    finish(scrub)
    core.cache.report_bad(1.0, 1, core.cache.load(1.0, 1, KEYS[3:4], 1e9).lease, np.array([0]))
    core.cache.client_gone(1.0, 1)
    offset = int(core.cache.reserve(1.0, 2, KEYS[3:4]).offset[0])
    core.l1.bytes[offset : offset + PAGE] = BYTES[3]
    core.cache.commit(1.0, 2, KEYS[3:4], SUMS[3:4])
    for call in late:
        call()
    assert there(core) == COUNT
    assert core.cache.counters.scrub_bad_pages == 0
    check_books(core.cache)


def test_slots_that_belong_to_others_by_now_are_left_alone(core: Core) -> None:
    scrub = Scrub(core, now, percent=100)
    core.cache.drop_all(1.0)
    fresh = KEYS ^ np.uint8(255)
    core.cache.reserve(1.0, 2, fresh)  # they are being written: their bytes match nothing
    finish(scrub)
    assert core.cache.counters.scrubbed_pages == 0
    assert core.cache.counters.scrub_bad_pages == 0


def test_it_takes_no_more_than_its_share_of_time(
    core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrub_module, "BATCH_PAGES", 10)
    time = [0.0]
    waited: list[float] = []

    class Watched(Heart):
        def wait(self, seconds: float, slice_seconds: float = 1.0) -> bool:
            waited.append(seconds)
            if len(waited) == COUNT // 10:
                self.stopping.set()
            return self.stopping.is_set()

    scrub = Scrub(core, now, percent=20, clock=lambda: time[0])
    step = scrub.step

    def slow() -> None:
        step()
        time[0] += 0.5

    monkeypatch.setattr(scrub, "step", slow)
    scrub.run(Watched(lambda: time[0]))
    assert waited == [2.0] * 5, "half a second of work, two of rest"
    assert scrub.left == 0
