"""KVTierNodes come, change hands and go with nodes and policies (on a simulated API server)."""

from __future__ import annotations

from typing import Any

import pytest
from kvtier_operator.observe.store import CACHE_NODES, NODES, POLICIES

H100 = {"nodeSelector": {"matchLabels": {"gpu": "h100"}}}


def specs(api: Any) -> dict[str, Any]:
    return {name: raw["spec"] for name, raw in api.all_of(CACHE_NODES).items()}


async def test_a_selected_node_gets_the_policys_revision_in_full(api: Any, start: Any) -> None:
    api.put_node("a", gpu="h100")
    api.put_node("b", gpu="none")
    process = start()
    api.put_policy("chat", **H100, page={"tokens": 512})
    await process.settle()
    spec = specs(api)
    assert spec.keys() == {"a"}
    assert spec["a"]["policy"]["name"] == "chat"
    assert spec["a"]["stable"]["spec"]["page"]["tokens"] == 512
    assert spec["a"]["nodeUID"] == api.objects[NODES, "a"]["metadata"]["uid"]
    assert spec["a"]["reportIntervalSeconds"] == 10
    assert "orphanedAt" not in spec["a"]


async def test_an_edit_reaches_every_node_after_its_revision_is_stored(
    api: Any, start: Any
) -> None:
    for name in "abc":
        api.put_node(name, gpu="h100")
    api.put_policy("chat", **H100)
    process = start()
    await process.settle()
    api.writes.clear()
    api.put_policy("chat", **H100, page={"tokens": 512})
    await process.settle()
    assert {s["stable"]["spec"]["page"]["tokens"] for s in specs(api).values()} == {512}
    order = [plural for _, plural, _ in api.writes]
    assert order.index("controllerrevisions") < order.index("kvtiernodes/")
    assert order.count("kvtiernodes/") == 3


async def test_a_node_that_leaves_takes_its_object_with_it(api: Any, start: Any) -> None:
    api.put_node("a", gpu="h100")
    api.put_policy("chat", **H100)
    process = start()
    await process.settle()
    first = api.objects[CACHE_NODES, "a"]["metadata"]["uid"]
    api.remove(NODES, "a")
    await process.settle()
    assert specs(api) == {}
    api.put_node("a", gpu="h100")
    await process.settle()
    assert api.objects[CACHE_NODES, "a"]["metadata"]["uid"] != first
    assert specs(api)["a"]["policy"]["name"] == "chat"


async def test_a_node_made_anew_while_the_operator_was_away_is_another_node(
    api: Any, start: Any
) -> None:
    api.put_node("a", gpu="h100")
    api.put_policy("chat", **H100)
    await start().settle()
    first = api.objects[CACHE_NODES, "a"]["metadata"]["uid"]
    api.remove(NODES, "a")
    api.put_node("a", gpu="h100")
    await start().settle()
    assert api.objects[CACHE_NODES, "a"]["metadata"]["uid"] != first
    assert specs(api)["a"]["nodeUID"] == api.objects[NODES, "a"]["metadata"]["uid"]


async def test_a_node_without_a_policy_is_kept_for_the_grace_period_then_retired_once(
    api: Any, start: Any
) -> None:
    api.put_node("a", gpu="h100")
    api.put_policy("chat", **H100)
    process = start(orphan_grace_seconds=600)
    await process.settle()
    api.remove(POLICIES, "chat")
    await process.settle()
    spec = specs(api)["a"]
    assert "policy" not in spec
    assert "stable" not in spec
    assert spec["orphanedAt"]
    await process.settle(500)
    assert specs(api)["a"] == spec
    await process.settle(120)
    assert specs(api) == {}
    deletes = [w for w in api.writes if w[0] == "delete" and w[1] == CACHE_NODES]
    assert len(deletes) == 1
    await process.settle(3600)
    assert len([w for w in api.writes if w[0] == "delete" and w[1] == CACHE_NODES]) == 1


@pytest.mark.parametrize("skew", [-86_400.0, 86_400.0])
async def test_a_wrong_clock_neither_shortens_nor_stretches_the_grace(
    api: Any, start: Any, skew: float
) -> None:
    api.put_node("a", gpu="h100")
    api.put_policy("chat", **H100)
    wrong = start(orphan_grace_seconds=600, skew=skew)
    await wrong.settle()
    api.remove(POLICIES, "chat")
    await wrong.settle()
    orphaned = specs(api)["a"]
    await wrong.settle(60)
    right = start(orphan_grace_seconds=600)
    await right.settle(590)  # a restart gives the orphan a full grace again
    assert specs(api)["a"] == orphaned
    await right.settle(20)
    assert specs(api) == {}


async def test_an_orphan_that_is_selected_again_is_as_if_nothing_had_been(
    api: Any, start: Any
) -> None:
    api.put_node("a", gpu="h100")
    api.put_policy("chat", **H100)
    process = start()
    await process.settle()
    before = specs(api)["a"]
    api.put_node("a", gpu="other")
    await process.settle()
    assert "policy" not in specs(api)["a"]
    api.put_node("a", gpu="h100")
    await process.settle()
    assert specs(api)["a"] == before


async def test_a_node_changes_hands_at_once(api: Any, start: Any) -> None:
    api.put_node("a", gpu="h100")
    api.put_policy("low", **H100, priority=1)
    process = start()
    await process.settle()
    api.put_policy("high", **H100, priority=2, page={"tokens": 1024})
    await process.settle()
    spec = specs(api)["a"]
    assert spec["policy"]["name"] == "high"
    assert spec["stable"]["spec"]["page"]["tokens"] == 1024
    status = api.objects[POLICIES, "low"]["status"]
    assert status["supersededBy"] == [{"node": "a", "policy": "high"}]
    assert status["nodes"]["selected"] == 0
    api.remove(POLICIES, "high")
    await process.settle()
    assert specs(api)["a"]["policy"]["name"] == "low"
    assert api.objects[POLICIES, "low"]["status"]["supersededBy"] == []


async def test_a_cache_node_that_somebody_edits_or_deletes_is_put_right(
    api: Any, start: Any
) -> None:
    api.put_node("a", gpu="h100")
    api.put_policy("chat", **H100)
    process = start()
    await process.settle()
    wanted = specs(api)["a"]
    raw = api.objects[CACHE_NODES, "a"]
    raw["spec"] = {**raw["spec"], "stable": {**raw["spec"]["stable"]}}
    raw["spec"]["stable"]["spec"] = {**raw["spec"]["stable"]["spec"], "durability": "none"}
    api._save(CACHE_NODES, raw, "MODIFIED")
    await process.settle()
    assert specs(api)["a"] == wanted
    api.remove(CACHE_NODES, "a")
    await process.settle()
    assert specs(api)["a"] == wanted


async def test_the_report_interval_follows_the_number_of_nodes(api: Any, start: Any) -> None:
    for i in range(500):
        api.put_node(f"n{i:03}", gpu="h100")
    api.put_policy("chat", **H100)
    process = start()
    await process.settle()
    assert {s["reportIntervalSeconds"] for s in specs(api).values()} == {10}
    for i in range(500, 560):
        api.put_node(f"n{i:03}", gpu="h100")
    await process.settle(30)
    assert len(specs(api)) == 560
    assert {s["reportIntervalSeconds"] for s in specs(api).values()} == {12}
    api.writes.clear()
    await process.settle(60)
    assert [w for w in api.writes if w[1].startswith(CACHE_NODES)] == []


async def test_hands_off_means_no_write_for_that_policy(api: Any, start: Any) -> None:
    api.put_node("a", gpu="h100")
    api.put_policy("chat", **H100)
    process = start()
    await process.settle()
    api.annotate("chat", {"kvtier.io/reconcile": "paused"})
    await process.settle()
    said = api.objects[POLICIES, "chat"]["status"]["conditions"]
    assert ("Reconciling", "ReconcilePaused") in [(c["type"], c["reason"]) for c in said]
    api.writes.clear()
    before = specs(api)
    api.put_policy("chat", **H100, page={"tokens": 512})
    api.put_node("b", gpu="h100")
    api.put_node("a", gpu="other")
    await process.settle(60)
    assert api.writes == []
    assert specs(api) == before
    api.annotate("chat", {})
    await process.settle()
    assert specs(api)["b"]["stable"]["spec"]["page"]["tokens"] == 512
    assert "policy" not in specs(api)["a"]
