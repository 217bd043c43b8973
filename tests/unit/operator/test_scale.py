"""A thousand nodes under five policies: the work grows with the cluster, not with its square."""

from __future__ import annotations

from typing import Any

from kvtier_operator.observe.store import CACHE_NODES, Store


class Counting:
    """Counts calls of one method."""

    def __init__(self, monkeypatch: Any, cls: type, name: str) -> None:
        self.calls = 0
        original = getattr(cls, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(cls, name, counted)


async def test_a_thousand_nodes_and_five_policies(api: Any, start: Any, monkeypatch: Any) -> None:
    from kvtier_operator.runtime.reconciler import Reconciler

    count, gpus = 1000, 5
    for i in range(count):
        api.put_node(f"n{i:04}", gpu=str(i % gpus), all="yes")
    for g in range(gpus - 1):
        selector = {"matchLabels": {"gpu": str(g)}}
        api.put_policy(f"gpu-{g}", nodeSelector=selector, priority=1)
    api.put_policy("rest", nodeSelector={"matchLabels": {"all": "yes"}})
    process = start()
    reconciles = Counting(monkeypatch, Reconciler, "reconcile")
    plans = Counting(monkeypatch, Reconciler, "_plan_node")
    await process.settle(20)
    assert len(api.all_of(CACHE_NODES)) == count
    assert len([w for w in api.writes if w[1] == "kvtiernodes/"]) == count
    # Each node once for its write and once for hearing of it; policies a handful of times.
    assert reconciles.calls <= 3 * count + 100
    assert plans.calls <= 8 * count

    for name in api.all_of(CACHE_NODES):
        api.report(name)
    await process.settle(20)
    api.writes.clear()
    reconciles.calls = plans.calls = 0
    api.put_policy(
        "gpu-0", nodeSelector={"matchLabels": {"gpu": "0"}}, priority=1, durability="none"
    )
    await process.settle(20)
    edited = count // gpus
    assert len([w for w in api.writes if w[1] == "kvtiernodes/"]) == edited
    assert reconciles.calls <= 3 * edited + 100

    api.writes.clear()
    reconciles.calls = 0
    for name in api.all_of(CACHE_NODES):  # a round of ordinary reports costs nothing
        api.report(name)
    await process.settle(20)
    after_edit = [w for w in api.writes if w[1].startswith("kvtierpolicies")]
    assert len(after_edit) <= 4  # gpu-0 comes into force
    assert not [w for w in api.writes if w[1] == "kvtiernodes/"]
    api.writes.clear()
    reconciles.calls = 0
    for name in api.all_of(CACHE_NODES):
        api.report(name)
    await process.settle(5)
    assert api.writes == []
    assert reconciles.calls <= 2 * gpus


def test_an_own_write_that_comes_back_as_an_event_concerns_nobody() -> None:
    store = Store(lambda: 0.0, lambda: 0.0, lambda: 0.0)
    raw = {
        "metadata": {"name": "a", "uid": "u", "resourceVersion": "5", "generation": 1},
        "spec": {"nodeUID": "x", "reportIntervalSeconds": 10, "orphanGraceSeconds": 3600},
    }
    assert store.observe(CACHE_NODES, raw) == {("node", "a")}
    assert store.observe(CACHE_NODES, raw) == set()
