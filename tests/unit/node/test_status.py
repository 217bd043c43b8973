"""KVTierNode.status: what each state of the node looks like from outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from kvtier_agent.node import lifecycle
from kvtier_agent.node.budgets import plan
from kvtier_agent.node.desired import Absent, Problem, Wanted
from kvtier_agent.node.facts import MemoryLimit
from kvtier_agent.node.status import make_status, previous_conditions
from kvtier_agent.node.view import NodeView
from kvtier_api.node import KVTierNode, TierStatus
from kvtier_api.reasons import Reason
from kvtier_api.validate import validate

GI = 1 << 30
Make = Callable[..., Any]
TIERS = (TierStatus(name="hbm", capacity_bytes=10, used_bytes=5, pages=1),)


def status(view: NodeView, *, wall: float = 1e9, before: Any = ()) -> dict[str, Any]:
    made = make_status(
        view, TIERS, {"misses": 7, "unheard_of": 1}, before, wall=wall, version="1", boot_id="b"
    )
    whole = {
        "apiVersion": "kvtier.io/v1alpha1",
        "kind": "KVTierNode",
        "metadata": {"name": "n"},
        "status": made,
    }
    assert validate(whole) == []
    assert KVTierNode.read(whole).status.boot_id == "b"
    return made


def condition(made: dict[str, Any], type_: str) -> tuple[str, str, str]:
    (found,) = [c for c in made["conditions"] if c["type"] == type_]
    return found["status"], found["reason"], found.get("message", "")


def serving(wanted: Wanted, facts: Any) -> NodeView:
    return NodeView(
        at=10.0,
        life=lifecycle.applied(lifecycle.START, wanted),
        heard=True,
        generation=3,
        wanted=wanted.revision,
        budgets=plan(wanted.spec, facts),
    )


def test_in_force(wanted: Make, facts: Make) -> None:
    made = status(serving(wanted(), facts()))
    assert condition(made, "Ready")[:2] == ("True", "InForce")
    assert condition(made, "Clamped")[:2] == ("False", "NotClamped")
    assert condition(made, "Stalled")[:2] == ("False", "Applied")
    assert made["revision"] == wanted().revision
    assert made["observedGeneration"] == 3
    assert made["counters"]["misses"] == 7
    (hbm,) = made["tiers"]
    assert (hbm["name"], hbm["capacityBytes"], hbm["usedBytes"], hbm["pages"]) == ("hbm", 10, 5, 1)
    assert made["lastReportTime"] == "2001-09-09T01:46:40Z"


def test_partly_applied_names_the_fields(wanted: Make, facts: Make) -> None:
    made = status(serving(wanted(), facts(shape="engine")))
    state, reason, message = condition(made, "Ready")
    assert (state, reason) == ("True", "PartlyApplied")
    assert "tiers.hbm" in message
    assert "tiers.hbm" in made["notApplied"]


def test_clamped_has_both_figures(wanted: Make, facts: Make) -> None:
    limit = MemoryLimit(50 * GI, "the Pod's memory limit", 2 * GI)
    made = status(serving(wanted(), facts(memory=limit)))
    state, reason, message = condition(made, "Clamped")
    assert (state, reason) == ("True", "MemoryLimit")
    assert "48Gi of 96Gi" in message


def test_a_refused_revision_stalls_while_the_last_good_one_serves(
    wanted: Make, facts: Make
) -> None:
    view = replace(
        serving(wanted(), facts()), refusal=Problem(Reason.VolumeUnknown, "volume d is not mapped")
    )
    made = status(view)
    assert condition(made, "Ready")[:2] == ("True", "InForce")
    state, reason, message = condition(made, "Stalled")
    assert (state, reason) == ("True", "VolumeUnknown")
    assert "stays in force" in message


def test_a_first_revision_that_is_refused_leaves_the_node_not_ready(wanted: Make) -> None:
    view = NodeView(
        heard=True, wanted="f" * 64, refusal=Problem(Reason.OutOfMemory, "no room for it")
    )
    made = status(view)
    assert condition(made, "Ready") == ("False", "OutOfMemory", "no room for it")
    assert made["revision"] == ""
    assert made["notApplied"] == []


def test_no_policy_counts_down(wanted: Make, facts: Make) -> None:
    view = serving(wanted(), facts())
    life, _ = lifecycle.step(view.life, Absent(60.0), 10.0)
    made = status(replace(view, life=life, at=30.0, wanted=""))
    state, reason, message = condition(made, "Ready")
    assert (state, reason) == ("False", "NoPolicy")
    assert "another 40 s" in message
    assert made["revision"] == wanted().revision, "what is held is still served under it"


def test_before_and_after_everything(wanted: Make, facts: Make) -> None:
    assert condition(status(NodeView()), "Ready")[:2] == ("False", "Starting")
    assert condition(status(NodeView(heard=True)), "Ready")[:2] == ("False", "NoPolicy")
    stopping = replace(serving(wanted(), facts()), stopping=True)
    assert condition(status(stopping), "Ready")[:2] == ("False", "Stopping")
    sick = replace(serving(wanted(), facts()), causes=("mover-0: died: OSError: x",))
    state, reason, message = condition(status(sick), "Ready")
    assert (state, reason) == ("False", "Unhealthy")
    assert message == "mover-0 is not alive: died: OSError: x"


def test_transition_times_move_only_with_the_status(wanted: Make, facts: Make) -> None:
    first = status(serving(wanted(), facts()), wall=1e9)
    again = status(serving(wanted(), facts()), wall=2e9, before=previous_conditions(first))
    assert again["conditions"] == first["conditions"]
    view = replace(serving(wanted(), facts()), refusal=Problem(Reason.VolumeFull, "full"))
    changed = status(view, wall=3e9, before=previous_conditions(first))
    times = {c["type"]: c["lastTransitionTime"] for c in changed["conditions"]}
    assert times["Ready"] == "2001-09-09T01:46:40Z"
    assert times["Stalled"] != times["Ready"]


def test_conditions_that_cannot_be_read_are_made_anew() -> None:
    assert previous_conditions({"conditions": [{"type": 7}]}) == ()
    assert previous_conditions({}) == previous_conditions({"conditions": 7}) == ()


@pytest.mark.parametrize(
    "theirs",
    [
        {"type": "example.com/Audited", "status": "True", "reason": "Seen", "message": "m",
         "lastTransitionTime": "2001-01-01T00:00:00Z"},
        {"type": "example.com/Audited", "status": "of a newer API"},
    ],
    ids=["readable", "unreadable"],
)  # fmt: skip
def test_conditions_of_other_controllers_stay_theirs(
    wanted: Make, facts: Make, theirs: dict[str, str]
) -> None:
    first = status(serving(wanted(), facts()), wall=1e9)
    stands = {**first, "conditions": [theirs, *first["conditions"]]}
    again = status(serving(wanted(), facts()), wall=2e9, before=previous_conditions(stands))
    assert again["conditions"] == first["conditions"], "not applied with ours, and ours kept"


def test_a_second_agent_is_said(wanted: Make, facts: Make) -> None:
    made = status(replace(serving(wanted(), facts()), rival="0123abcd"))
    state, reason, message = condition(made, "Ready")
    assert (state, reason) == ("False", "TwoAgents")
    assert "0123abcd" in message
    assert made["revision"] == wanted().revision, "it serves all the same"


def test_memory_that_a_client_cut_short_is_said(wanted: Make, facts: Make) -> None:
    made = status(replace(serving(wanted(), facts()), cut=("dram of domain chat",)))
    state, reason, message = condition(made, "Ready")
    assert (state, reason) == ("False", "MemoryCut")
    assert "dram of domain chat" in message
