"""A replay over a drive that fails at random: no wrong byte, no failed request, each fault counted
once. The whole trace with calls that take 30 s is marked slow; `python -m faults` runs any."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import leftovers
import pytest
from faults.drive import Chances, FailingDrive
from faults.rings import FailingRings
from faults.run import WHOLE, Seen, Sizes, run
from kvtier_agent.replay.sessions import SessionSettings, SessionTraffic
from kvtier_agent.replay.trace import Trace, read_trace
from ring_faults import why_no_ring

RECORDED = Path(__file__).parents[4] / "shared/data/traces/mooncake_conversation.jsonl.gz"
EVERY_KIND = frozenset({"EIO", "ENOSPC", "EROFS", "short", "slow", "checksum"})


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a short name, for sockets; in memory, so that no call is slow of itself."""
    path = Path(tempfile.mkdtemp(prefix=leftovers.owned_name("faults-"), dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drive that failed is tried again at once: more faults in the same time."""
    monkeypatch.setattr("kvtier_agent.cache.outcomes.FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr("kvtier_agent.cache.outcomes.LONGEST_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr("kvtier_agent.storage.volume_health.FIRST_REST_SECONDS", 0.01)
    monkeypatch.setattr("kvtier_agent.storage.volume_health.LONGEST_REST_SECONDS", 0.05)


def generated(count: int, seed: int) -> Trace:
    return Trace(requests=list(SessionTraffic(SessionSettings(seed=seed)).requests(count=count)))


def kinds(seen: Seen) -> set[str]:
    return {fault for _, fault in seen.injected}


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("kind", [
    FailingDrive,
    pytest.param(
        FailingRings, marks=pytest.mark.skipif(bool(why_no_ring()), reason=why_no_ring())
    ),
])  # fmt: skip
def test_a_drive_that_fails_costs_misses_and_nothing_else(
    folder: Path, kind: type[FailingDrive]
) -> None:
    chances = Chances(fault=0.05, slow_seconds=2.0, most_slow=3)
    trace = generated(200, seed=2)
    seen = run(trace, folder, 2, chances, Sizes(), 60, kind, EVERY_KIND)
    assert seen.problems() == []
    assert kinds(seen) == EVERY_KIND
    assert seen.hits_l2 > 0, "nothing came back from the drive"
    assert seen.after.whole.l2 > 0
    assert (seen.late > 0) == (kind is FailingRings)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("recorded", [True, False], ids=["recorded-rings", "generated-calls"])
def test_a_whole_trace_over_a_drive_that_fails(folder: Path, recorded: bool) -> None:
    if recorded and not RECORDED.exists():
        pytest.skip(f"no recorded trace at {RECORDED.name}; the generated one runs")
    trace = read_trace(RECORDED, limit=3000) if recorded else generated(2000, seed=9)
    chances = Chances(fault=0.05, slow_seconds=30.0, most_slow=3)
    kind = FailingRings if recorded and not why_no_ring() else FailingDrive
    seen = run(trace, folder, 5, chances, WHOLE, least_faults=100, kind=kind, every=EVERY_KIND)
    assert seen.problems() == []
    assert (seen.late > 0) == (kind is FailingRings)
    assert kinds(seen) == EVERY_KIND
