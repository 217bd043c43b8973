"""Memory rules: what a revision is given on a machine, and what is said when that is less."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_agent.node.budgets import NotApplicableError, plan
from kvtier_agent.node.facts import Device, Facts, MemoryLimit, TableFacts, VolumeFacts
from kvtier_api.policy import RevisionSpec
from kvtier_api.reasons import Reason
from kvtier_api.validate import parse

GI = 1 << 30
MI = 1 << 20
Make = Callable[..., Any]


def test_the_reference_split(revision: Make, facts: Make) -> None:
    budgets = plan(revision(tiers={"nvme": {"size": "2Ti", "volumes": ["data0"]}}), facts())
    assert (budgets.hbm_base, budgets.l0, budgets.l1) == (16 * GI, 16 * GI, 96 * GI)
    assert (budgets.l2, budgets.volumes, budgets.reserve_percent) == (2048 * GI, ("data0",), 10)
    assert budgets.clamps == ()
    assert budgets.not_applied == ()


def test_l0_of_ours_is_a_share_of_the_one_device_that_it_lies_on(
    revision: Make, facts: Make
) -> None:
    eight = Device("cuda", (80 * GI,) * 8)
    budgets = plan(revision(), facts(device=eight))
    assert (budgets.hbm_base, budgets.l0, budgets.l1) == (16 * GI, 16 * GI, 96 * GI)
    assert plan(revision(), facts(device=Device("cuda", (24 * GI, 80 * GI)))).l0 == 24 * GI // 5
    most = plan(revision(tiers={"hbm": {"size": "100Gi"}}), facts(device=eight))
    assert most.l0 == 80 * GI
    assert str(most.clamps[0]) == "hbm: 80Gi of 100Gi, the device that it lies on has 80Gi"


def test_engines_have_their_pools_on_all_devices(revision: Make, facts: Make) -> None:
    """A share of all of them stands for the pools until the engines have registered."""
    budgets = plan(revision(), facts(shape="engine", device=Device("cuda", (80 * GI,) * 4)))
    assert (budgets.hbm_base, budgets.l0, budgets.l1) == (64 * GI, 0, 384 * GI)


def test_sizes_win_over_shares(revision: Make, facts: Make) -> None:
    spec = revision(tiers={"hbm": {"size": "10Gi"}, "dram": {"size": "30Gi"}})
    budgets = plan(spec, facts())
    assert (budgets.l0, budgets.l1) == (10 * GI, 30 * GI)


def test_without_a_device_the_stand_in_counts_and_is_said(revision: Make, facts: Make) -> None:
    budgets = plan(revision(), facts(device=Device("cpu", (2 * GI,))))
    assert budgets.l0 == 2 * GI * 20 // 100
    assert budgets.l1 == 6 * budgets.l0
    assert "percentOfDevice is of 2Gi" in budgets.notes[0]


def test_the_pods_limit_clamps_with_both_figures(revision: Make, facts: Make) -> None:
    limit = MemoryLimit(50 * GI, "the Pod's memory limit", 2 * GI)
    budgets = plan(revision(), facts(memory=limit))
    assert budgets.l1 == 48 * GI
    (clamp,) = budgets.clamps
    assert clamp.reason is Reason.MemoryLimit
    assert str(clamp) == (
        "dram: 48Gi of 96Gi, the Pod's memory limit is 50Gi less 2Gi for the process"
    )


def test_without_a_pods_limit_tiers_grow_into_what_is_available_only(
    revision: Make, facts: Make
) -> None:
    def machine(available: int, held: int = 0) -> object:
        limit = MemoryLimit(512 * GI, "this machine's memory", 2 * GI, available)
        return facts(memory=limit, arenas_held=held)

    spec = revision()  # asks for 96Gi
    first = plan(spec, machine(50 * GI))
    assert first.l1 == 48 * GI
    assert first.clamps[0].reason is Reason.MemoryLimit
    assert str(first.clamps[0]) == (
        "dram: 48Gi of 96Gi, this machine has 50Gi available, with what the tiers hold, less 2Gi "
        "for the process"
    )
    # Others take all of the rest: what is in force stays. They leave: it grows by what is there.
    assert plan(spec, machine(0, 48 * GI), first).l1 == 48 * GI
    assert plan(spec, machine(12 * GI, 48 * GI), first).l1 == 58 * GI
    assert plan(spec, machine(200 * GI, 48 * GI), first).clamps == ()
    # Backed in whole slots, a little less than was given: no reason to give less.
    assert plan(spec, machine(0, 47 * GI), first).l1 == 48 * GI
    # What an earlier process left is ours to take over.
    assert plan(spec, machine(1 * GI, 96 * GI)).l1 == 96 * GI
    # A revision that asks for less gets less.
    small = revision(tiers={"dram": {"size": "8Gi"}})
    assert plan(small, machine(0, 48 * GI), first).l1 == 8 * GI


def test_l0_in_shared_memory_stays_too(revision: Make, facts: Make) -> None:
    spec = revision(tiers={"hbm": {"size": "10Gi"}, "dram": {"size": "90Gi"}})
    limit = MemoryLimit(512 * GI, "this machine's memory", 2 * GI, 42 * GI)
    given = {"device": Device("cpu", (20 * GI,)), "memory": limit}
    first = plan(spec, facts(**given))
    assert (first.l0, first.l1) == (10 * GI, 30 * GI)
    given["memory"] = MemoryLimit(512 * GI, "this machine's memory", 2 * GI, 0)
    again = plan(spec, facts(**given, arenas_held=40 * GI), first)
    assert (again.l0, again.l1) == (first.l0, first.l1)


def test_shared_memory_clamps(revision: Make, facts: Make) -> None:
    budgets = plan(revision(), facts(shm_available=10 * GI))
    assert budgets.l1 == 10 * GI
    assert budgets.clamps[0].reason is Reason.SharedMemory
    assert "shared memory has 10Gi left" in str(budgets.clamps[0])


def test_room_that_came_after_the_start_is_for_the_next_process(
    revision: Make, facts: Make
) -> None:
    """The arenas of this one cannot grow into it."""
    budgets = plan(revision(), facts(arenas_most=40 * GI))
    assert budgets.l1 == 40 * GI
    assert budgets.clamps[0].reason is Reason.SharedMemory
    assert "restart it to use more" in str(budgets.clamps[0])
    on_cpu = plan(revision(), facts(arenas_most=40 * GI, device=Device("cpu", (400 * GI,))))
    assert on_cpu.l0 + on_cpu.l1 == 40 * GI
    first = plan(revision(), facts(arenas_most=40 * GI, shm_available=30 * GI))
    assert "shared memory has 30Gi left" in str(first.clamps[0]), "the nearer bound is the one said"


def test_l0_without_a_device_shares_the_room_with_l1(revision: Make, facts: Make) -> None:
    spec = revision(tiers={"hbm": {"size": "8Gi"}, "dram": {"size": "8Gi"}})
    roomy = plan(spec, facts(device=Device("cpu", (2 * GI,))))
    assert (roomy.l0, roomy.l1) == (8 * GI, 8 * GI)
    tight = plan(spec, facts(device=Device("cpu", (2 * GI,)), shm_available=10 * GI))
    assert (tight.l0, tight.l1) == (5 * GI, 5 * GI)
    assert [c.tier for c in tight.clamps] == ["hbm", "dram"]


def test_a_device_gives_no_more_than_it_has(revision: Make, facts: Make) -> None:
    budgets = plan(revision(tiers={"hbm": {"size": "100Gi"}}), facts())
    assert budgets.l0 == 80 * GI
    assert budgets.clamps[0].reason is Reason.OutOfMemory


def test_no_room_at_all_cannot_be_applied(revision: Make, facts: Make) -> None:
    limit = MemoryLimit(2 * GI, "the Pod's memory limit", 2 * GI)
    with pytest.raises(NotApplicableError, match="raise the Pod's memory limit") as e:
        plan(revision(), facts(memory=limit))
    assert e.value.reason is Reason.OutOfMemory


def test_an_unmapped_volume_cannot_be_applied(revision: Make, facts: Make) -> None:
    spec = revision(tiers={"nvme": {"size": "1Gi", "volumes": ["data0", "data7"]}})
    with pytest.raises(NotApplicableError, match="--volume data7=DIR") as e:
        plan(spec, facts())
    assert e.value.reason is Reason.VolumeUnknown
    assert "mapped: data0" in e.value.message


def test_nvme_leaves_the_reserve_and_counts_what_it_holds(revision: Make, facts: Make) -> None:
    spec = revision(tiers={"nvme": {"size": "1Ti", "volumes": ["data0"], "reservePercent": 10}})
    volume = VolumeFacts(total=1000 * GI, available=300 * GI, held=100 * GI)
    budgets = plan(spec, facts(volumes={"data0": volume}))
    assert budgets.l2 == 300 * GI
    assert budgets.clamps[0].tier == "nvme"
    full = VolumeFacts(total=1000 * GI, available=50 * GI)
    assert plan(spec, facts(volumes={"data0": full})).l2 == 0


def test_a_volume_that_turned_read_only_keeps_what_it_holds(revision: Make, facts: Make) -> None:
    spec = revision(tiers={"nvme": {"size": "1Ti", "volumes": ["data0"]}})
    volume = VolumeFacts(total=1000 * GI, available=600 * GI, held=100 * GI, read_only=True)
    budgets = plan(spec, facts(volumes={"data0": volume}))
    assert budgets.l2 == 100 * GI
    assert budgets.clamps[0].reason is Reason.VolumeReadOnly
    assert "volume data0 being read-only" in str(budgets.clamps[0])


def test_a_drive_that_turns_read_only_is_a_difference_at_any_size(
    revision: Make, facts: Make
) -> None:
    spec = revision(tiers={"nvme": {"size": "100Gi", "volumes": ["data0"]}})
    full = VolumeFacts(total=1000 * GI, available=600 * GI, held=99 * GI)
    before = plan(spec, facts(volumes={"data0": full}))
    after = plan(spec, facts(volumes={"data0": replace(full, read_only=True)}))
    assert after.differs(before, 5)
    assert not after.differs(after, 5)


def test_a_volume_that_cannot_be_looked_at(revision: Make, facts: Make) -> None:
    spec = revision(tiers={"nvme": {"size": "1Ti", "volumes": ["data0"]}})
    with pytest.raises(NotApplicableError, match="/mnt/x: Input/output error; mount it") as e:
        plan(spec, facts(volumes={}, broken={"data0": "/mnt/x: Input/output error"}))
    assert e.value.reason is Reason.VolumeUnusable


def test_engine_shape_has_no_l0_and_says_what_is_not_obeyed(revision: Make, facts: Make) -> None:
    before = plan(revision(), facts(shape="engine"))
    assert before.l0 == 0
    assert before.l1 == 96 * GI
    assert "no engine has registered" in before.notes[0]
    after = plan(revision(), facts(shape="engine", engine_pool=40 * GI))
    assert (after.l0, after.l1) == (0, 240 * GI)
    assert after.notes == ()
    assert {"tiers.hbm", "pressure.demotePercent"} <= set(after.not_applied)
    assert "valueDensity.thresholdMicrosecondsPerMiB.hbm" in after.not_applied
    bounded = revision(tenants={"quotas": [{"tenant": "search", "hbmPercent": 40}]})
    assert "tenants.quotas.hbmPercent" in plan(bounded, facts(shape="engine")).not_applied
    assert plan(bounded, facts()).not_applied == ()


def test_engines_with_other_pages_than_the_policys_are_said(revision: Make, facts: Make) -> None:
    spec = revision(page={"tokens": 512})
    before, same = plan(spec, facts()), plan(spec, facts(page_tokens=(512,)))
    assert before == same
    other = plan(spec, facts(page_tokens=(256, 512)))
    assert other.not_applied == ("page.tokens",)
    assert "pages of 256 tokens, page.tokens is 512" in other.notes[-1]
    assert other.differs(same, percent=5), "status follows although no byte has moved"
    engine = plan(spec, facts(page_tokens=(256,), shape="engine", engine_pool=GI))
    assert {"page.tokens", "tiers.hbm"} <= set(engine.not_applied)


def test_small_drift_is_no_difference(revision: Make, facts: Make) -> None:
    one = plan(revision(), facts(shm_available=50 * GI))
    near = plan(revision(), facts(shm_available=49 * GI))
    far = plan(revision(), facts(shm_available=40 * GI))
    assert not one.differs(near, percent=5)
    assert one.differs(far, percent=5)


sizes = st.integers(1, 1 << 40).map(lambda n: max(1 << 20, n)).map(str)


@given(
    l0=sizes,
    l1=sizes,
    limit=st.none() | st.integers(0, 1 << 41),
    shm=st.integers(0, 1 << 41),
    kind=st.sampled_from(["cpu", "cuda"]),
    device=st.integers(1 << 20, 1 << 40),
)
def test_never_more_than_there_is(
    l0: str, l1: str, limit: int | None, shm: int, kind: Any, device: int
) -> None:
    spec = parse(
        RevisionSpec,
        {
            "valueDensity": {"model": "classic"},
            "tiers": {"hbm": {"size": l0}, "dram": {"size": l1}},
        },
    )
    memory = None if limit is None else MemoryLimit(limit, "a limit", 2 * GI)
    facts = Facts("owned", Device(kind, (device,)), memory, shm)
    try:
        budgets = plan(spec, facts)
    except NotApplicableError:
        return
    room = shm if limit is None else min(shm, max(0, limit - 2 * GI))
    shared = budgets.l1 + (budgets.l0 if kind == "cpu" else 0)
    assert shared <= room
    if kind == "cuda":
        assert budgets.l0 <= device
    asked = int(l0) + int(l1)
    assert (budgets.l0 + budgets.l1 < asked) == bool(budgets.clamps)


def test_a_drive_that_fails_is_named_and_counts_for_nothing_once_it_is_lost(
    revision: Make, facts: Make
) -> None:
    spec = revision(
        tiers={"nvme": {"size": "100Gi", "volumes": ["data0", "data1"], "reservePercent": 0}}
    )
    well = VolumeFacts(total=80 * GI, available=80 * GI)
    before = plan(spec, facts(volumes={"data0": well, "data1": well}))
    assert (before.l2, before.clamps) == (100 * GI, ())
    failing = replace(well, failing="Input/output error")
    after = plan(spec, facts(volumes={"data0": failing, "data1": well}))
    assert after.l2 == 100 * GI
    assert after.clamps[0].reason is Reason.VolumeUnusable
    assert "volume data0 failing: Input/output error" in str(after.clamps[0])
    assert after.differs(before, 5), "it is said though no size has changed"
    lost = plan(spec, facts(volumes={"data0": replace(failing, lost=True), "data1": well}))
    assert lost.l2 == 80 * GI


def test_a_full_volume_is_named_whether_the_tier_is_smaller_by_it_or_not(
    revision: Make, facts: Make
) -> None:
    spec = revision(
        tiers={"nvme": {"size": "100Gi", "volumes": ["data0", "data1"], "reservePercent": 0}}
    )
    full = VolumeFacts(total=80 * GI, available=0, full=True)
    budgets = plan(spec, facts(volumes={"data0": full, "data1": replace(full, full=False)}))
    assert budgets.clamps[0].reason is Reason.VolumeFull
    assert "volume data0 is full" in str(budgets.clamps[0])
    roomy = VolumeFacts(total=400 * GI, available=400 * GI)
    enough = plan(spec, facts(volumes={"data0": full, "data1": roomy}))
    assert enough.l2 == 100 * GI
    (clamp,) = enough.clamps
    assert clamp.reason is Reason.VolumeFull, "said though the tier has its size"
    assert "volume data0 is full" in str(clamp)
    well = plan(spec, facts(volumes={"data0": replace(full, full=False), "data1": roomy}))
    assert well.clamps == ()
    assert enough.differs(well, 5)


def test_a_volume_below_its_reserve_is_named(revision: Make, facts: Make) -> None:
    nvme = {"size": "100Gi", "volumes": ["data0", "data1"], "reservePercent": 10}
    used = VolumeFacts(total=100 * GI, available=4 * GI)
    roomy = VolumeFacts(total=80 * GI, available=40 * GI)
    budgets = plan(revision(tiers={"nvme": nvme}), facts(volumes={"data0": used, "data1": roomy}))
    (clamp,) = budgets.clamps
    assert (budgets.l2, clamp.reason) == (32 * GI, Reason.VolumeFull)
    assert "volume data0 has 4Gi free, below its reserve of 10Gi" in str(clamp)
    assert "data1" not in str(clamp)


def test_tiers_that_have_more_slots_than_records_are_named(revision: Make, facts: Make) -> None:
    spec = revision(
        tiers={
            "hbm": {"size": "1Gi"},
            "dram": {"size": "4Gi"},
            "nvme": {"size": "64Gi", "volumes": ["data0"]},
        }
    )
    before = plan(spec, facts())
    # 1024 + 4096 + 32768 pages in all.
    table = TableFacts(max_pages=6144, share=1, slot=MI, nvme_slot=2 * MI)
    budgets = plan(spec, facts(tables=(table,)))
    (clamp,) = budgets.clamps
    assert (clamp.tier, clamp.reason) == ("nvme", Reason.PageTable)
    assert str(clamp).startswith("nvme: 2Gi of 64Gi, --max-pages 6144 leaves records for 1024 of")
    assert budgets.differs(before, 5), "it is said though no size has changed"
    small = plan(spec, facts(tables=(replace(table, max_pages=1024),)))
    assert [clamp.tier for clamp in small.clamps] == ["dram", "nvme"]
    two = plan(spec, facts(tables=(replace(table, share=2),)))
    assert str(two.clamps[0]).startswith("nvme: 14Gi of 64Gi"), "each domain has its own table"
    enough = plan(spec, facts(tables=(replace(table, max_pages=1 << 16),)))
    assert enough.clamps == ()


def test_a_frozen_prefix_that_does_not_fit_is_named_with_what_to_write(
    revision: Make, facts: Make
) -> None:
    prefixes = [{"name": "bot", "maxSize": "2Gi"}, {"name": "tools", "maxSize": "12Gi"}]
    spec = revision(frozenPrefixes=prefixes)
    assert plan(spec, facts()).clamps == ()
    budgets = plan(spec, facts(device=Device("cuda", (50 * GI,))))  # L0 is a fifth of it
    (clamp,) = budgets.clamps
    assert clamp.reason is Reason.FrozenTooLarge
    assert str(clamp) == (
        "frozenPrefixes tools: 7Gi of 12Gi, all of them may take 90 % of hbm (10Gi); "
        "give it a maxSize of 7Gi, or make tiers.hbm larger"
    )
    assert (budgets.l0, budgets.l1) == (10 * GI, 60 * GI)


def test_where_the_engine_owns_l0_frozen_prefixes_must_fit_into_dram(
    revision: Make, facts: Make
) -> None:
    prefixes = [{"name": "bot", "maxSize": "9Gi"}, {"name": "tools", "maxSize": "1Gi"}]
    spec = revision(frozenPrefixes=prefixes)
    limit = MemoryLimit(12 * GI, "the Pod's memory limit", 2 * GI)
    budgets = plan(spec, facts(shape="engine", memory=limit))
    assert [clamp.tier for clamp in budgets.clamps] == ["dram", "frozenPrefixes tools"]
    assert str(budgets.clamps[1]).endswith(
        "all of them may take 90 % of dram (10Gi); leave it out, or make tiers.dram larger"
    )
