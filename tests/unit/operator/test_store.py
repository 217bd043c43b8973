"""What the operator holds in memory: right after any order of events, and quiet about noise."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from kvtier_api.conditions import parse_timestamp
from kvtier_operator.decide import selection
from kvtier_operator.observe import store as store_module
from kvtier_operator.observe.store import CACHE_NODES, NODES, POLICIES, Store


def node(name: str, version: int, uid: str = "", **labels: str) -> dict[str, Any]:
    meta = {"name": name, "uid": uid or f"u-{name}", "resourceVersion": str(version)}
    return {"metadata": {**meta, "labels": labels}, "status": {"images": ["large"] * 3}}


def policy(name: str, version: int, uid: str = "", **spec: Any) -> dict[str, Any]:
    meta = {"name": name, "uid": uid or f"u-{name}"}
    meta |= {"resourceVersion": str(version), "generation": 1}
    return {
        "apiVersion": "kvtier.io/v1alpha1",
        "kind": "KVTierPolicy",
        "metadata": meta,
        "spec": {"valueDensity": {"model": "classic"}, **spec},
    }


def cache(
    name: str, version: int, report: str = "", *, uid: str = "", **status: Any
) -> dict[str, Any]:
    meta = {"name": name, "uid": uid or f"k-{name}"}
    meta |= {"resourceVersion": str(version), "generation": 1}
    spec = {"reportIntervalSeconds": 10, "orphanGraceSeconds": 3600}
    return {"metadata": meta, "spec": spec, "status": {"lastReportTime": report, **status}}


MIDNIGHT = parse_timestamp("2026-11-30T00:00:00Z")


def make(seen: float = 1000.0, wall: float = MIDNIGHT) -> Store:
    return Store(lambda: seen, lambda: wall, lambda: 0.0)


def test_heartbeats_and_counters_concern_nobody() -> None:
    store = make()
    store.observe(NODES, node("a", 1, gpu="x"))
    store.observe(POLICIES, policy("p", 1))
    assert store.observe(NODES, {**node("a", 2, gpu="x"), "status": {"conditions": [1]}}) == set()
    store.observe(CACHE_NODES, cache("a", 3, "2026-11-30T00:00:00Z"))
    later = cache("a", 4, "2026-11-30T00:00:10Z", counters={"hitsL0": 9}, tiers=[{"name": "hbm"}])
    assert store.observe(CACHE_NODES, later) == set()


def test_what_a_report_changes_concerns_the_policies_of_the_node() -> None:
    store = make()
    store.observe(NODES, node("a", 1))
    store.observe(POLICIES, policy("p", 1))
    store.observe(CACHE_NODES, cache("a", 3))
    keys = store.observe(CACHE_NODES, cache("a", 4, "2026-11-30T00:00:00Z", revision="a" * 64))
    assert keys == {("policy", "p")}


def test_a_list_tells_of_deletions_that_no_event_told() -> None:
    store = make()
    store.replace(NODES, [node("a", 1), node("b", 2)], 5)
    store.observe(NODES, node("c", 9))
    keys = store.replace(NODES, [node("b", 2)], 8)
    assert set(store.nodes) == {"b", "c"}  # c is newer than the list
    assert ("node", "a") in keys


def test_events_older_than_a_list_are_ignored() -> None:
    store = make()
    store.replace(NODES, [node("b", 2)], 8)
    assert store.observe(NODES, node("a", 7)) == set()
    assert set(store.nodes) == {"b"}


def test_older_versions_never_overwrite_newer_ones() -> None:
    store = make()
    store.observe(NODES, node("a", 5, gpu="new"))
    store.observe(NODES, node("a", 4, gpu="old"))
    assert store.nodes["a"].labels == {"gpu": "new"}


def test_the_end_of_a_namesake_does_not_remove_its_successor() -> None:
    store = make()
    store.observe(NODES, node("a", 5, uid="first"))
    store.observe(NODES, node("a", 9, uid="second"))
    assert store.remove(NODES, node("a", 8, uid="first")) == set()
    assert store.nodes["a"].uid == "second"
    store.remove(NODES, node("a", 10, uid="second"))
    assert store.nodes == {}


def test_what_is_gone_does_not_come_back_with_a_late_answer() -> None:
    """The answer to an own write arrives after the event that says that the object is gone."""
    for kind, old, new in (
        (POLICIES, policy("a", 5), policy("a", 9, uid="second")),
        (NODES, node("a", 5), node("a", 9, uid="second")),
        (CACHE_NODES, cache("a", 5), cache("a", 9, uid="second")),
    ):
        store = make()
        store.observe(kind, old)
        store.remove(kind, old)
        old["metadata"]["resourceVersion"] = "7"
        assert store.observe(kind, old) == set()
        assert {*store.policies, *store.nodes, *store.cache_nodes} == set()
        assert store.observe(kind, new) != set()
    store = make()
    store.replace(NODES, [node("a", 1)], 5)
    store.replace(NODES, [], 8)
    assert store.observe(NODES, node("a", 9)) == set()


def test_a_first_sight_is_as_old_as_the_agent_says_later_ones_are_new() -> None:
    store = make(seen=1000.0, wall=MIDNIGHT + 70)
    store.observe(CACHE_NODES, cache("a", 1, "2026-11-30T00:00:00Z"))
    assert store.reported_at["a"] == 930.0
    store.observe(CACHE_NODES, cache("a", 2, "1999-01-01T00:00:00Z"))  # a clock set wrong
    assert store.reported_at["a"] == 1000.0


def test_a_node_that_reports_again_after_being_stale_concerns_its_policy() -> None:
    seen = [1000.0]
    store = Store(lambda: seen[0], lambda: MIDNIGHT, lambda: 0.0)
    store.observe(NODES, node("a", 1))
    store.observe(POLICIES, policy("p", 1))
    store.observe(CACHE_NODES, cache("a", 2, "2026-11-30T00:00:00Z"))
    seen[0] += 20
    assert store.observe(CACHE_NODES, cache("a", 3, "2026-11-30T00:00:20Z")) == set()
    seen[0] += 31
    assert store.observe(CACHE_NODES, cache("a", 4, "2026-11-30T00:00:51Z")) == {("policy", "p")}


LABELS = st.sampled_from(["x", "y", ""])
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["node", "policy", "drop-node", "drop-policy", "cache"]),
        st.sampled_from("abcd"),
        LABELS,
        st.integers(0, 2),
    ),
    max_size=30,
)


@given(STEPS)
@settings(deadline=None)
def test_the_index_is_what_a_look_at_everything_would_say(steps: Any) -> None:
    store = make()
    uids: dict[tuple[str, str], str] = {}
    for version, (what, name, label, rank) in enumerate(steps, 1):
        if what == "node":
            uid = uids.setdefault((NODES, name), f"n-{version}")
            store.observe(NODES, node(name, version, uid, **({"gpu": label} if label else {})))
        elif what == "policy":
            selector = {"matchLabels": {"gpu": label}} if label else {}
            uid = uids.setdefault((POLICIES, name), f"p-{version}")
            spec = {"nodeSelector": selector, "priority": rank}
            store.observe(POLICIES, policy(name, version, uid, **spec))
        elif what == "cache":
            store.observe(CACHE_NODES, cache(name, version))
        else:
            kind = NODES if what == "drop-node" else POLICIES
            store.remove(kind, {"metadata": {"name": name, "uid": uids.pop((kind, name), "none")}})
    for name, fact in store.nodes.items():
        wanted = selection.candidates(fact, store.cache_nodes.get(name), store.policies.values())
        assert store.candidates.get(name, ()) == wanted
    assert set(store.candidates) <= set(store.nodes)
    selected: dict[str, set[str]] = {}
    for name, policies in store.candidates.items():
        for p in policies:
            selected.setdefault(p, set()).add(name)
    assert store.selected == selected
    there = store.nodes.keys() & store.cache_nodes.keys()
    assert store.reporting() == len(store.candidates.keys() | there)
    for p in store.policies:
        assert store.ruled(p) == sorted(n for n, c in store.candidates.items() if c[0] == p)


def test_the_work_grows_with_nodes_times_policies_not_with_their_square(
    monkeypatch: Any,
) -> None:
    looks = [0]

    def counting(*args: Any) -> bool:
        looks[0] += 1
        return selection.selects(*args)

    monkeypatch.setattr(store_module, "selects", counting)
    original = selection.candidates

    def counted(fact: Any, held: Any, policies: Any) -> Any:
        found = list(policies)
        looks[0] += len(found)
        return original(fact, held, found)

    monkeypatch.setattr(store_module, "candidates", counted)
    store = make()
    for p in range(5):
        store.observe(POLICIES, policy(f"p{p}", 1 + p, priority=p))
    store.replace(NODES, [node(f"n{i}", 10 + i) for i in range(1000)], 2000)
    assert looks[0] <= 5 * 1000 + 5
    looks[0] = 0
    store.observe(POLICIES, policy("p0", 3000, priority=9))
    assert looks[0] <= 1000
    looks[0] = 0
    store.observe(NODES, node("n1", 3001, gpu="x"))
    assert looks[0] <= 5
