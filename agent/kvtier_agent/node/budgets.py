"""From a revision and what the machine has to bytes per tier: the memory rules, in one place.

The rules (all sizes in bytes):

1. *HBM base.* Shape ``owned``: the revision's size, or its percent of the memory of the first
   device, for all of L0 lies there (without a device the stand-in). Shape ``engine``: the KV pool
   that the engines registered; before the first one registers, the percent of the memory of all
   devices stands for it. L0 is the base in shape ``owned`` and nothing of ours in shape ``engine``.
2. *L1.* The revision's size, or its ratio times the HBM base; at most what is there: the memory
   limit less the headroom, and what the shared-memory filesystem has left; of what came after the
   process started nothing, for its arenas cannot grow into that. Its pages count against the Pod.
   Where no Pod's limit holds, a tier *grows* only into what the machine has available now less the
   headroom; it does not shrink because others took memory since (page cache moves all the time,
   and a page of ours that is dropped would be recomputed).
3. *L0 on a CPU* is shared memory like L1 and lives off the same room: it is given at most half of
   the room, and L1 the rest.
4. *NVMe.* The revision's size over all its volumes; at most what those filesystems have left above
   the reserve. The reserve is checked again before each write: this is about saying it early, and
   about giving space back when others fill the volume. A volume that turned read-only keeps what
   it holds; one whose writes go on failing counts for nothing.
5. A page needs a record in its domain's page table too: tiers that could hold more pages than there
   are records are named; the cache sees to it that nothing stands still.
6. Frozen prefixes take at most a part of the tier that keeps them; those that do not fit get less,
   in the order of the policy.
7. What came out smaller than asked is a `Clamp` that names both figures and what was in the way.
   What cannot work at all is `NotApplicableError`, and the revision before stays in force.

Rules 2 to 4 share what is there evenly between trust domains; the figures here are for the node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvtier_api.policy import RevisionSpec
from kvtier_api.reasons import Reason

from kvtier_agent.cache.frozen import FROZEN_PERCENT, fit_frozen
from kvtier_agent.node.facts import Facts
from kvtier_agent.units import human

__all__ = ["Clamp", "NodeBudgets", "NotApplicableError", "plan"]

LEAST_TIER: Final = 1 << 20
"""Below this a memory tier holds no page of any real model."""

NOT_OBEYED_IN_ENGINE_SHAPE: Final = (
    "pressure.demotePercent",
    "replacement.coolDownSeconds",
    "tiers.hbm",
    "valueDensity.thresholdMicrosecondsPerMiB.hbm",
)
"""The engine's own pool is L0 there: its size and what leaves it are the engine's business. (The
cool-down still holds between DRAM and NVMe.)"""


class NotApplicableError(Exception):
    """A revision that this node cannot put in force; ``message`` says what to do."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(frozen=True, slots=True)
class Clamp:
    """A tier, or a frozen prefix, that got less than the revision asks for."""

    tier: str
    wanted: int
    given: int
    limit: str
    reason: Reason

    def __str__(self) -> str:
        return f"{self.tier}: {human(self.given)} of {human(self.wanted)}, {self.limit}"


@dataclass(frozen=True, slots=True)
class NodeBudgets:
    """Bytes per tier on the node. ``hbm_base``: what ratioToHBM multiplies. ``volumes`` in the
    revision's order. ``notes``: what status should say though nothing is wrong."""

    hbm_base: int
    l0: int
    l1: int
    l2: int = 0
    volumes: tuple[str, ...] = ()
    reserve_percent: int = 0
    clamps: tuple[Clamp, ...] = ()
    not_applied: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unwell: tuple[str, ...] = ()
    """What makes the tiers less than their bytes say: volumes that take no writes or are full, page
    tables that are too small. In words."""

    def shared_memory(self, facts: Facts) -> int:
        """Bytes of these that lie in shared memory."""
        return self.l1 + (self.l0 if facts.device.kind == "cpu" else 0)

    def differs(self, other: NodeBudgets, percent: int) -> bool:
        """Whether any tier differs by more than ``percent`` of the larger, or any volume at all.
        Free space moves all the time; budgets follow it in steps."""
        if self.volumes != other.volumes or self.reserve_percent != other.reserve_percent:
            return True
        if (self.not_applied, self.notes) != (other.not_applied, other.notes):
            return True  # status has something else to say
        if self.unwell != other.unwell:
            return True  # news, however little the tier is smaller by it
        pairs = ((self.l0, other.l0), (self.l1, other.l1), (self.l2, other.l2))
        return any(abs(a - b) * 100 > max(a, b) * percent for a, b in pairs)


def plan(spec: RevisionSpec, facts: Facts, in_force: NodeBudgets | None = None) -> NodeBudgets:
    """The bytes this node gives a revision; ``in_force``: what it gives now. Raises
    `NotApplicableError`."""
    base, notes = _hbm_base(spec, facts)
    l0_wanted = base if facts.shape == "owned" else 0
    l1_wanted = (
        spec.tiers.dram.size.bytes
        if spec.tiers.dram.size is not None
        else (spec.tiers.dram.ratio_to_hbm or 0) * base
    )
    room, what, why = _room(facts, 0 if in_force is None else in_force.shared_memory(facts))
    clamps: list[Clamp] = []
    l0 = l0_wanted
    if l0 and facts.device.kind == "cpu":
        if l0 + l1_wanted > room:
            l0 = min(l0, room // 2)
        if l0 < l0_wanted:
            text = f"L0 without a device lies in DRAM, {what}"
            clamps.append(Clamp("hbm", l0_wanted, l0, text, why))
        room -= l0
        what = f"{what} and L0 takes {human(l0)} of it"
    elif l0 > facts.device_memory:
        l0 = facts.device_memory
        text = f"the device that it lies on has {human(l0)}"
        clamps.append(Clamp("hbm", l0_wanted, l0, text, Reason.OutOfMemory))
    l1 = min(l1_wanted, room)
    if l1 < min(l1_wanted, LEAST_TIER):
        raise NotApplicableError(
            Reason.OutOfMemory,
            f"no room for the dram tier: {human(l1_wanted)} asked, {what}; raise the Pod's memory "
            "limit or write a smaller tiers.dram.size",
        )
    if l1 < l1_wanted:
        clamps.append(Clamp("dram", l1_wanted, l1, what, why))
    l2, volumes, reserve, l2_clamp, unwell = _nvme(spec, facts)
    if l2_clamp is not None:
        clamps.append(l2_clamp)
    short = _short_of_records(facts, l0, l1, l2)
    clamps += short
    unwell += tuple(f"{clamp.tier}, {clamp.limit}" for clamp in short)
    clamps += _frozen(spec, facts, l0, l1)
    not_applied: tuple[str, ...] = NOT_OBEYED_IN_ENGINE_SHAPE if facts.shape == "engine" else ()
    if not_applied and any(quota.hbm_percent is not None for quota in spec.tenants.quotas):
        not_applied = tuple(sorted((*not_applied, "tenants.quotas.hbmPercent")))
    other = [tokens for tokens in facts.page_tokens if tokens != spec.page.tokens]
    if other:
        # Page size is the engine's choice at its start: all that can be done is to say so.
        not_applied = tuple(sorted((*not_applied, "page.tokens")))
        theirs = " and ".join(map(str, other))
        notes = (
            *notes,
            f"engines have pages of {theirs} tokens, page.tokens is {spec.page.tokens}: start them "
            "with the policy's",
        )
    return NodeBudgets(
        hbm_base=base,
        l0=l0,
        l1=l1,
        l2=l2,
        volumes=volumes,
        reserve_percent=reserve,
        clamps=tuple(clamps),
        not_applied=not_applied,
        notes=notes,
        unwell=unwell,
    )


def _short_of_records(facts: Facts, l0: int, l1: int, l2: int) -> list[Clamp]:
    """Tiers that hold fewer pages than they have bytes for, in the first domain of which that is
    so: the highest tiers get records first."""
    for table in facts.tables:
        left, clamps = table.max_pages, list[Clamp]()
        for tier, size, slot in (
            *(("hbm", l0, table.slot), ("dram", l1, table.slot)),
            ("nvme", l2, table.nvme_slot),
        ):
            wanted = size // table.share // slot
            given = min(wanted, left)
            left -= given
            if given < wanted:
                limit = (
                    f"--max-pages {table.max_pages} leaves records for {given} of {wanted} pages of"
                    f" {human(slot)}; raise it"
                )
                of_all = given * slot * table.share
                clamps.append(Clamp(tier, size, of_all, limit, Reason.PageTable))
        if clamps:
            return clamps
    return []


def _frozen(spec: RevisionSpec, facts: Facts, l0: int, l1: int) -> list[Clamp]:
    """Prefixes of which less can stay than the policy says."""
    tier, size = ("hbm", l0) if facts.shape == "owned" else ("dram", l1)
    wanted = [prefix.max_size.bytes for prefix in spec.frozen_prefixes]
    clamps = []
    for prefix, most in zip(spec.frozen_prefixes, fit_frozen(wanted, size), strict=True):
        if most < prefix.max_size.bytes:
            what = f"give it a maxSize of {human(most)}" if most else "leave it out"
            limit = (
                f"all of them may take {FROZEN_PERCENT} % of {tier} ({human(size)}); {what}, or"
                f" make tiers.{tier} larger"
            )
            name = f"frozenPrefixes {prefix.name}"
            clamps.append(Clamp(name, prefix.max_size.bytes, most, limit, Reason.FrozenTooLarge))
    return clamps


def _hbm_base(spec: RevisionSpec, facts: Facts) -> tuple[int, tuple[str, ...]]:
    if facts.shape == "engine" and facts.engine_pool:
        return facts.engine_pool, ()
    notes: list[str] = []
    hbm = spec.tiers.hbm
    if hbm.size is not None:
        base = hbm.size.bytes
    else:
        base = facts.device_memory * (hbm.percent_of_device or 0) // 100
        if facts.device.kind == "cpu":
            notes.append(f"no device: percentOfDevice is of {human(facts.device_memory)}")
    if facts.shape == "engine":
        notes.append(f"no engine has registered its KV pool; {human(base)} stand for it")
    return base, tuple(notes)


def _room(facts: Facts, given: int) -> tuple[int, str, Reason]:
    """Bytes of shared memory the arenas may take, and what bounds them; they are ``given`` now."""
    why = Reason.SharedMemory
    room, what = facts.shm_available, f"shared memory has {human(facts.shm_available)} left"
    if facts.memory is not None:
        left = max(0, facts.memory.size - facts.memory.headroom)
        if left < room:
            room, why = left, Reason.MemoryLimit
            what = (
                f"{facts.memory.source} is {human(facts.memory.size)} less "
                f"{human(facts.memory.headroom)} for the process"
            )
        if facts.memory.available is not None:
            now = facts.memory.available + facts.arenas_held
            left = max(now - facts.memory.headroom, facts.arenas_held, given)
            if left < room:
                room, why = left, Reason.MemoryLimit
                what = (
                    f"this machine has {human(now)} available, with what the tiers hold, less "
                    f"{human(facts.memory.headroom)} for the process"
                )
    if facts.arenas_most is not None and facts.arenas_most < room:
        room, why = facts.arenas_most, Reason.SharedMemory
        what = f"there was room for {human(room)} when the agent started; restart it to use more"
    return room, what, why


def _nvme(
    spec: RevisionSpec, facts: Facts
) -> tuple[int, tuple[str, ...], int, Clamp | None, tuple[str, ...]]:
    nvme = spec.tiers.nvme
    if nvme is None:
        return 0, (), 0, None, ()
    for name in nvme.volumes:
        if name in facts.broken:
            raise NotApplicableError(
                Reason.VolumeUnusable,
                f"volume {name} cannot be used: {facts.broken[name]}; mount it, or take it out of "
                "tiers.nvme.volumes",
            )
        if name not in facts.volumes:
            known = ", ".join(sorted(facts.volumes)) or "none"
            raise NotApplicableError(
                Reason.VolumeUnknown,
                f"volume {name} is not mapped on this node (mapped: {known}); start the agent "
                f"with --volume {name}=DIR (chart value volumes) or take it out of "
                "tiers.nvme.volumes",
            )
    room, why = 0, Reason.VolumeFull
    limit = f"above the reserve of {nvme.reserve_percent} %"
    failing: list[str] = []
    full: list[str] = []
    short: list[str] = []
    for name in nvme.volumes:
        volume = facts.volumes[name]
        if volume.read_only:
            # What lies there is still read, so the tier does not shrink below it.
            room += volume.held
            why = Reason.VolumeReadOnly
            failing.append(f"volume {name} being read-only")
            continue
        if volume.failing:
            why = Reason.VolumeUnusable
            failing.append(f"volume {name} failing: {volume.failing}")
            if volume.lost:
                continue
        reserve = volume.total * nvme.reserve_percent // 100
        if volume.full and not volume.failing:
            full.append(f"volume {name} is full")
        free = volume.available + volume.held
        if free <= reserve:
            short.append(
                f"volume {name} has {human(volume.available)} free, below its reserve of "
                f"{human(reserve)}"
            )
        room += max(0, free - reserve)
    wanted = nvme.size.bytes
    given = min(wanted, room)
    said = ", ".join([*(failing or [limit]), *full, *short])
    limit = f"the volumes have {human(room)}, {said}"
    # A volume that takes no writes is said even where the others have room enough.
    less = given < wanted or failing or full
    clamp = Clamp("nvme", wanted, given, limit, why) if less else None
    return given, tuple(nvme.volumes), nvme.reserve_percent, clamp, (*failing, *full)
