"""The agent and its KVTierNode: what is read, what is written, how often, and through outages."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from controlplane import ControlPlane
from controlplane.testing import Kube

SECTIONS = {"tiers": {"hbm": {"size": "1Gi"}, "dram": {"size": "4Gi"}}}
OTHER = {"tiers": {"hbm": {"size": "1Gi"}, "dram": {"size": "6Gi"}}}

Make = Callable[..., Any]


def status(kube: Kube, name: str) -> dict[str, Any]:
    found = kube.find("ktn", name)
    return (found or {}).get("status") or {}


def condition(kube: Kube, name: str, type_: str) -> tuple[str, str]:
    for c in status(kube, name).get("conditions") or []:
        if c["type"] == type_:
            return c["status"], c["reason"]
    return "", ""


def in_force(kube: Kube, name: str, revision: str) -> Callable[[], bool]:
    return lambda: status(kube, name).get("revision") == revision


def status_writes(plane: ControlPlane, name: str, since: int) -> int:
    return sum(
        1
        for e in plane.audit_events(since)
        if e.get("stage") == "ResponseComplete"
        and e.get("objectRef", {}).get("resource") == "kvtiernodes"
        and e["objectRef"].get("subresource") == "status"
        and e["objectRef"].get("name") == name
        and e.get("verb") in ("patch", "update")
    )


def test_a_revision_comes_into_force_and_is_reported(
    kube: Kube, ktn: Make, node_side: Make
) -> None:
    first = ktn("node-a", SECTIONS)
    side = node_side("node-a")
    kube.eventually(in_force(kube, "node-a", first), what="the first revision is reported")
    assert condition(kube, "node-a", "Ready") == ("True", "InForce")
    assert condition(kube, "node-a", "Stalled") == ("False", "Applied")
    assert side.budgets.l1 == 4 << 30
    now = status(kube, "node-a")
    assert now["observedGeneration"] == kube.get("ktn", "node-a")["metadata"]["generation"]
    assert now["bootID"] == "boot-1"

    second = ktn("node-a", OTHER)
    assert second != first
    kube.eventually(in_force(kube, "node-a", second), what="the edit is reported", timeout=5.0)
    assert side.budgets.l1 == 6 << 30
    generation = kube.get("ktn", "node-a")["metadata"]["generation"]
    assert status(kube, "node-a")["observedGeneration"] == generation


def test_no_object_is_waited_for_and_never_made(kube: Kube, ktn: Make, node_side: Make) -> None:
    node_side("node-b")
    time.sleep(2.0)
    assert kube.list("ktn") == []
    revision = ktn("node-b", SECTIONS)
    kube.eventually(in_force(kube, "node-b", revision), what="the new object is answered")


def test_only_the_own_object_is_looked_at(kube: Kube, ktn: Make, node_side: Make) -> None:
    mine = ktn("node-c", SECTIONS)
    node_side("node-c")
    kube.eventually(in_force(kube, "node-c", mine), what="in force")
    ktn("node-d", OTHER)
    time.sleep(1.0)
    assert status(kube, "node-d").get("revision", "") == ""
    assert status(kube, "node-c")["revision"] == mine


def test_a_revision_that_cannot_be_applied_leaves_the_last_good_one(
    kube: Kube, ktn: Make, node_side: Make
) -> None:
    good = ktn("node-e", SECTIONS)
    node_side("node-e")
    kube.eventually(in_force(kube, "node-e", good), what="in force")
    ktn("node-e", {**SECTIONS, "tiers": {"nvme": {"size": "1Gi", "volumes": ["data7"]}}})
    kube.eventually(
        lambda: condition(kube, "node-e", "Stalled") == ("True", "VolumeUnknown"),
        what="the refusal is reported",
    )
    assert status(kube, "node-e")["revision"] == good
    assert condition(kube, "node-e", "Ready") == ("True", "InForce")
    ktn("node-e", SECTIONS, revision="0" * 64)
    kube.eventually(
        lambda: condition(kube, "node-e", "Stalled") == ("True", "InvalidRevision"),
        what="content that does not match its hash is refused",
    )
    assert status(kube, "node-e")["revision"] == good


def test_without_a_policy_pages_are_kept_for_the_grace_and_then_dropped(
    kube: Kube, ktn: Make, node_side: Make
) -> None:
    revision = ktn("node-f", SECTIONS)
    side = node_side("node-f")
    kube.eventually(in_force(kube, "node-f", revision), what="in force")
    ktn("node-f", None, grace=3)
    kube.eventually(
        lambda: condition(kube, "node-f", "Ready") == ("False", "NoPolicy"), what="NoPolicy"
    )
    assert not side.behaviour.admitting
    assert side.drops == []
    # Back within the grace: as if nothing had been.
    ktn("node-f", SECTIONS, grace=3)
    kube.eventually(
        lambda: condition(kube, "node-f", "Ready") == ("True", "InForce"), what="back in force"
    )
    assert side.behaviour.admitting
    assert side.drops == []
    # Gone for good, object and all.
    kube.delete("ktn", "node-f")
    kube.eventually(lambda: side.drops, what="pages are dropped after the grace", timeout=10.0)
    assert side.budgets.l1 == 0
    again = ktn("node-f", OTHER)
    kube.eventually(in_force(kube, "node-f", again), what="a new object starts over")
    assert side.behaviour.admitting


def test_steady_state_is_one_write_an_interval_and_edits_are_written_at_once(
    kube: Kube, control_plane: ControlPlane, ktn: Make, node_side: Make
) -> None:
    revision = ktn("node-g", SECTIONS, interval=3)
    node_side("node-g")
    kube.eventually(in_force(kube, "node-g", revision), what="in force")
    time.sleep(1.5)
    since = control_plane.audit_log.stat().st_size
    time.sleep(7.0)
    steady = status_writes(control_plane, "node-g", since)
    assert 2 <= steady <= 3, steady
    before = control_plane.audit_log.stat().st_size
    for size in range(10):
        last = ktn(
            "node-g", {"tiers": {"hbm": {"size": "1Gi"}, "dram": {"size": f"{size + 1}Gi"}}},
            interval=3,
        )  # fmt: skip
        time.sleep(0.2)
    kube.eventually(in_force(kube, "node-g", last), what="the last edit is reported")
    # Ten edits in two seconds: at most one write a second, and the newest one wins.
    assert status_writes(control_plane, "node-g", before) <= 5


def test_an_outage_changes_nothing_and_is_caught_up_with(
    kube: Kube, control_plane: ControlPlane, ktn: Make, node_side: Make
) -> None:
    revision = ktn("node-h", SECTIONS)
    side = node_side("node-h")
    kube.eventually(in_force(kube, "node-h", revision), what="in force")
    control_plane.stop_apiserver()
    time.sleep(3.0)
    assert side.control.view.in_force == revision
    assert side.behaviour.admitting
    assert side.supervisor.causes() == []
    control_plane.start_apiserver()
    edited = kube.eventually(lambda: ktn("node-h", OTHER), what="the API server takes the edit")
    kube.eventually(
        in_force(kube, "node-h", edited), what="the edit after the outage", timeout=15.0
    )


def test_an_agent_that_starts_during_an_outage_waits(
    kube: Kube, control_plane: ControlPlane, ktn: Make, node_side: Make
) -> None:
    revision = ktn("node-i", SECTIONS)
    control_plane.stop_apiserver()
    side = node_side("node-i")
    time.sleep(2.0)
    assert side.supervisor.causes() == [], "an absent API server is no failure of the agent's"
    control_plane.start_apiserver()
    kube.eventually(in_force(kube, "node-i", revision), what="in force", timeout=15.0)


def test_a_loop_that_dies_comes_back_and_goes_on(kube: Kube, ktn: Make, node_side: Make) -> None:
    revision = ktn("node-j", SECTIONS)
    side = node_side("node-j")
    kube.eventually(in_force(kube, "node-j", revision), what="in force")
    side.supervisor.kill("kubernetes")
    kube.eventually(lambda: side.supervisor.causes(), what="health turns red")
    edited = ktn("node-j", OTHER)
    kube.eventually(in_force(kube, "node-j", edited), what="in force after the restart")


def test_two_agents_for_one_node_both_live_and_both_say_so_until_one_ends(
    kube: Kube, ktn: Make, node_side: Make
) -> None:
    revision = ktn("node-k", SECTIONS, interval=1)
    one, two = node_side("node-k"), node_side("node-k")
    kube.eventually(in_force(kube, "node-k", revision), what="in force")
    kube.eventually(
        lambda: one.cluster.rival() and two.cluster.rival(),
        what="each sees the other",
        timeout=30.0,
    )
    kube.eventually(
        lambda: condition(kube, "node-k", "Ready") == ("False", "TwoAgents"),
        what="the status says",
        timeout=30.0,
    )
    assert one.supervisor.causes() == []
    assert two.supervisor.causes() == []
    assert status(kube, "node-k")["bootID"] in ("boot-1", "boot-2")
    assert two.supervisor.stop(10.0) == []
    kube.eventually(
        lambda: (
            status(kube, "node-k")["bootID"] == "boot-1"
            and condition(kube, "node-k", "Ready") == ("True", "InForce")
        ),
        what="alone again",
        timeout=30.0,
    )
