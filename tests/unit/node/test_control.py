"""Putting revisions in force: refusals, orphans, restarts, drift."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvtier_agent.node.budgets import NotApplicableError
from kvtier_agent.node.control import RETRY_SECONDS, Control
from kvtier_agent.node.desired import Absent, Problem
from kvtier_agent.node.facts import Facts, MemoryLimit
from kvtier_agent.node.lifecycle import Phase, remaining_grace
from kvtier_agent.node.memory import Memory
from kvtier_agent.node.revision import NOTHING
from kvtier_agent.supervise import Heart
from kvtier_api.reasons import Reason
from structlog.testing import capture_logs

GI = 1 << 30
Make = Callable[..., Any]


class World:
    """A control over remembering tiers, a clock and facts that a test may change."""

    def __init__(self, tiers: Any, facts: Facts) -> None:
        self.now, self.tiers, self.facts = 1000.0, tiers, facts
        self.kept: list[str] = []
        self.control = self.fresh()

    def fresh(self) -> Control:
        return Control(
            self.tiers,
            lambda: self.facts,
            keep=lambda w: self.kept.append(w.revision),
            clock=lambda: self.now,
        )

    def turn(self, passes: float = 0.0) -> None:
        self.now += passes
        self.control.turn(self.now)

    def phase(self) -> Phase:
        return self.control.view.life.phase


def test_a_revision_is_prepared_then_put_in_force_and_kept(
    tiers: Any, facts: Make, wanted: Make
) -> None:
    world = World(tiers, facts())
    world.turn()
    assert tiers.calls == []
    one = wanted()
    world.control.say(one, None, 3)
    world.turn()
    assert tiers.calls == ["prepare", "reconfigure"]
    assert tiers.behaviour.admitting
    assert world.kept == [one.revision]
    view = world.control.view
    assert (view.in_force, view.generation, view.refusal) == (one.revision, 3, None)
    world.turn(1.0)
    assert tiers.calls == ["prepare", "reconfigure"], "the same word again is no work"


def test_a_refusal_names_the_last_good_revision_only_where_there_is_one(
    tiers: Any, facts: Make, wanted: Make
) -> None:
    world = World(tiers, facts())
    good, bad = wanted(), wanted(tiers={"nvme": nvme("data9")})
    with capture_logs() as lines:
        world.control.say(bad, None)
        world.turn()
    (line,) = lines
    assert line["event"] == "revision cannot be applied, and none is in force"
    assert "in_force" not in line
    world.control.say(good, None)
    world.turn(1.0)
    with capture_logs() as lines:
        world.control.say(bad, None)
        world.turn(1.0)
    (line,) = lines
    assert "the last good one stays in force" in line["event"]
    assert line["in_force"] == good.revision[:10]


def test_memory_that_others_take_shrinks_nothing_that_is_in_force(
    tiers: Any, facts: Make, wanted: Make
) -> None:
    def available(size: int) -> Facts:
        made: Facts = facts(memory=MemoryLimit(512 * GI, "the machine", 2 * GI, size))
        return made

    world = World(tiers, available(50 * GI))
    world.control.say(wanted(), None)
    world.turn()
    assert tiers.budgets.l1 == 48 * GI
    world.facts = available(1 * GI)
    world.turn(RETRY_SECONDS)
    assert tiers.budgets.l1 == 48 * GI
    world.control.say(wanted(replacement={"coolDownSeconds": 7}), None)
    world.turn(1.0)
    assert tiers.budgets.l1 == 48 * GI, "an edit that is about something else"


def test_a_refused_revision_leaves_the_last_good_one_and_is_tried_again_later(
    tiers: Any, facts: Make, wanted: Make
) -> None:
    world = World(tiers, facts())
    good, bad = wanted(), wanted(durability="sync", tiers={"nvme": nvme("data9")})
    world.control.say(good, None)
    world.turn()
    world.control.say(bad, None)
    world.turn(1.0)
    view = world.control.view
    assert view.in_force == good.revision
    assert view.wanted == bad.revision
    assert view.refusal is not None
    assert view.refusal.reason is Reason.VolumeUnknown
    assert tiers.calls == ["prepare", "reconfigure"]
    # Somebody maps the volume: it comes into force without another word.
    world.facts = facts(volumes={"data9": next(iter(facts().volumes.values()))})
    world.turn(RETRY_SECONDS)
    assert world.control.view.in_force == bad.revision
    assert world.control.view.refusal is None


def nvme(volume: str) -> dict[str, Any]:
    return {"size": "1Gi", "volumes": [volume]}


def test_a_preparation_of_minutes_is_not_taken_for_a_hang(
    tiers: Any, facts: Make, wanted: Make
) -> None:
    now = [0.0]
    heart = Heart(lambda: now[0])
    control = Control(tiers, lambda: facts())

    def prepare(behaviour: Any, budgets: Any, progress: Callable[[], None]) -> None:
        for _ in range(10):
            now[0] += 60.0
            progress()
            assert heart.age() == 0
        heart.stopping.set()

    tiers.prepare = prepare
    control.say(wanted(), None)
    control.run(heart)
    assert now[0] == 600
    assert control.view.in_force == wanted().revision


def test_a_failed_preparation_changes_nothing(tiers: Any, facts: Make, wanted: Make) -> None:
    world = World(tiers, facts())
    world.control.say(wanted(), None)
    world.turn()
    before = (tiers.behaviour, tiers.budgets)
    tiers.refuse = NotApplicableError(Reason.VolumeReadOnly, "volume data0 is read-only")
    world.control.say(wanted(durability="none"), None)
    world.turn(1.0)
    assert (tiers.behaviour, tiers.budgets) == before
    assert world.control.view.refusal == Problem(Reason.VolumeReadOnly, "volume data0 is read-only")


def test_a_word_that_comes_meanwhile_is_not_said_to_have_been_tried(
    tiers: Any, facts: Make, wanted: Make
) -> None:
    world = World(tiers, facts())
    one, two = wanted(), wanted(durability="none")
    refusal = NotApplicableError(Reason.VolumeReadOnly, "volume data0 is read-only")

    def prepare(*_: Any) -> None:
        world.control.say(two, None, 3)
        raise refusal

    world.control.say(one, None, 2)
    ready, tiers.prepare = tiers.prepare, prepare
    world.turn()
    view = world.control.view
    assert (view.generation, view.wanted) == (2, one.revision), "what was refused"
    assert view.refusal is not None
    tiers.prepare = ready
    world.turn(1.0)
    view = world.control.view
    assert (view.generation, view.in_force, view.refusal) == (3, two.revision, None)


def test_a_word_nobody_understands_is_reported_and_changes_nothing(
    tiers: Any, facts: Make, wanted: Make
) -> None:
    world = World(tiers, facts())
    world.control.say(wanted(), None, 1)
    world.turn()
    world.control.say(None, Problem(Reason.UnknownFields, "the agent does not know x", 2), 2)
    world.turn(1.0)
    view = world.control.view
    assert view.life.phase is Phase.SERVING
    assert view.refusal is not None
    assert view.generation == 2
    world.control.say(wanted(), None, 3)
    world.turn(1.0)
    assert world.control.view.refusal is None


def test_an_orphan_serves_admits_nothing_then_gives_everything_back(
    tiers: Any, facts: Make, wanted: Make
) -> None:
    world = World(tiers, facts())
    world.control.say(wanted(), None)
    world.turn()
    held = tiers.budgets
    world.control.say(Absent(5.0), None)
    world.turn(1.0)
    assert not tiers.behaviour.admitting
    assert tiers.budgets == held, "what is held stays"
    assert tiers.drops == 0
    world.turn(5.0)
    assert tiers.drops >= 1
    assert tiers.budgets == NOTHING
    assert world.control.view.in_force == ""
    # And a policy again: as if nothing had been.
    world.control.say(wanted(), None)
    world.turn(1.0)
    assert tiers.behaviour.admitting
    assert tiers.budgets == held


@pytest.mark.parametrize("at", ["stop-admitting", "drop"])
def test_what_an_orphan_could_not_give_up_it_gives_up_later(
    tiers: Any, facts: Make, wanted: Make, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tiers, facts())
    world.control.say(wanted(), None)
    world.turn()
    world.control.say(Absent(5.0), None)
    if at == "drop":
        world.turn(1.0)
    error = NotApplicableError(Reason.VolumeUnusable, "volume data0 is gone")
    real = tiers.reconfigure

    def refuse(*_: Any) -> None:
        raise error

    monkeypatch.setattr(tiers, "reconfigure", refuse)
    world.turn(1.0 if at == "stop-admitting" else 6.0)
    assert world.control.view.refusal == Problem(error.reason, error.message)
    monkeypatch.setattr(tiers, "reconfigure", real)
    world.turn(1.0)
    assert world.control.view.refusal is None
    assert not tiers.behaviour.admitting
    assert (tiers.budgets == NOTHING) == (at == "drop")


def test_without_a_policy_what_an_earlier_process_left_is_given_back(
    tiers: Any, facts: Make
) -> None:
    world = World(tiers, facts())
    world.control.resume(None, None)
    world.turn(1e6)
    assert tiers.drops == 0, "nobody has said yet that there is none"
    world.control.say(Absent(3600.0), None)
    world.turn(1.0)
    assert tiers.drops >= 1, "no grace: no revision was in force here"


def test_a_restart_serves_the_last_good_revision_before_anybody_speaks(
    tiers: Any, facts: Make, wanted: Make
) -> None:
    world = World(tiers, facts())
    world.control.resume(wanted(), None)
    assert world.control.view.in_force == wanted().revision
    world.turn(1e6)
    assert tiers.behaviour.admitting
    world.control.say(wanted(), None, 7)
    world.turn(1.0)
    assert tiers.calls == ["prepare", "reconfigure"]
    assert world.control.view.generation == 7


def test_a_restart_within_the_grace_goes_on_where_it_was(
    tiers: Any, facts: Make, wanted: Make
) -> None:
    world = World(tiers, facts())
    world.control.resume(wanted(), 4.0)
    assert not tiers.behaviour.admitting
    world.turn(3.0)
    assert world.phase() is Phase.ORPHANED
    world.turn(1.5)
    assert world.phase() is Phase.DROPPED


def test_a_restart_after_the_grace_brings_nothing_back(
    tmp_path: Path, tiers: Any, facts: Make, wanted: Make
) -> None:
    world, memory = World(tiers, facts()), Memory(tmp_path, "n")
    memory.keep(wanted())
    world.control.say(wanted(), None)
    world.turn()
    world.control.say(Absent(60.0), None)
    world.turn()
    world.turn(61.0)
    memory.save({}, remaining_grace(world.control.view.life, world.now))

    del tiers.calls[:]
    tiers.behaviour, tiers.drops = None, 0
    world.control = world.fresh()
    world.control.resume(*Memory(tmp_path, "n").recall())
    for word in (None, Absent(3600.0)):  # before the API server speaks, and after
        if word is not None:
            world.control.say(word, None, 4)
        world.turn(1.0)
        assert tiers.calls == [], "nothing is put in force, nothing backed"
        assert tiers.drops > 0
        assert world.phase() is Phase.DROPPED
    world.control.say(wanted(), None, 5)
    world.turn(1.0)
    assert tiers.behaviour.admitting


def test_a_restart_within_the_grace_that_can_apply_nothing_keeps_what_is_in_memory(
    tiers: Any, facts: Make, wanted: Make
) -> None:
    world = World(tiers, facts())
    tiers.refuse = NotApplicableError(Reason.VolumeUnusable, "volume data0 is not there yet")
    world.control.resume(wanted(), 1800.0)
    world.turn(1.0)
    world.control.say(Absent(3600.0), None, 4)
    world.turn(1790.0)
    assert tiers.drops == 0
    assert world.phase() is Phase.ORPHANED
    world.turn(10.0)
    assert tiers.drops > 0
    assert world.phase() is Phase.DROPPED


def test_a_last_good_revision_that_fails_at_restart_is_tried_again(
    tiers: Any, facts: Make, wanted: Make
) -> None:
    world = World(tiers, facts())
    tiers.refuse = NotApplicableError(Reason.VolumeUnusable, "volume data0 is not there yet")
    world.control.resume(wanted(), None)
    assert world.control.view.in_force == ""
    tiers.refuse = None
    world.turn(RETRY_SECONDS + 1)
    world.turn(RETRY_SECONDS + 1)
    assert world.control.view.in_force == wanted().revision


def test_drifting_facts_lead_to_new_budgets_in_steps(tiers: Any, facts: Make, wanted: Make) -> None:
    world = World(tiers, facts())
    world.control.say(wanted(), None)
    world.turn()

    def limited(size: int) -> Facts:
        made: Facts = facts(memory=MemoryLimit(size, "the Pod's memory limit", 2 * GI))
        return made

    world.facts = limited(96 * GI)  # 94Gi of 96Gi: within the step
    world.turn(RETRY_SECONDS)
    assert tiers.budgets.l1 == 96 * GI
    world.facts = limited(42 * GI)
    world.turn(RETRY_SECONDS)
    assert tiers.budgets.l1 == 40 * GI
    assert world.control.view.budgets is not None
    assert world.control.view.budgets.clamps[0].reason is Reason.MemoryLimit


def test_a_volume_that_fails_while_in_force_is_said_and_comes_back(
    tiers: Any, facts: Make, wanted: Make
) -> None:
    world = World(tiers, facts())
    world.control.say(wanted(tiers={"nvme": nvme("data0")}), None)
    world.turn()
    before = tiers.budgets
    world.facts = facts(volumes={}, broken={"data0": "/mnt/data0: Input/output error"})
    world.turn(RETRY_SECONDS)
    view = world.control.view
    assert view.refusal is not None
    assert view.refusal.reason is Reason.VolumeUnusable
    assert view.life.phase is Phase.SERVING
    assert tiers.budgets == before, "memory goes on serving"
    world.facts = facts()
    world.turn(RETRY_SECONDS + 1)
    world.turn(RETRY_SECONDS + 1)
    assert world.control.view.refusal is None


def test_a_view_that_did_not_change_wakes_nobody(tiers: Any, facts: Make, wanted: Make) -> None:
    world = World(tiers, facts())
    woken: list[int] = []
    world.control.changed = lambda: woken.append(1)
    world.control.say(wanted(), None)
    world.turn()
    world.turn(1.0)
    world.turn(1.0)
    assert len(woken) == 1


def test_stopping_admits_nothing_and_says_so(tiers: Any, facts: Make, wanted: Make) -> None:
    world = World(tiers, facts())
    world.control.say(wanted(), None)
    world.turn()
    world.control.stop_admitting()
    assert not tiers.behaviour.admitting
    assert world.control.view.stopping
