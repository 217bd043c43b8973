"""What a KVTierNode says, and what of it an agent may believe."""

from __future__ import annotations

from typing import Any

import pytest
from kvtier_agent.node.desired import Absent, Wanted
from kvtier_agent.node.interpret import read_node
from kvtier_api.policy import RevisionSpec
from kvtier_api.reasons import Reason
from kvtier_api.revision import revision_hash
from kvtier_api.validate import parse

SPEC: dict[str, Any] = {"valueDensity": {"model": "classic"}, "durability": "none"}
HASH = revision_hash(parse(RevisionSpec, SPEC))


def node(**spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "n", "generation": 4}, "spec": spec}


def ruled(content: dict[str, Any], revision: str = HASH, **more: Any) -> dict[str, Any]:
    policy = {"name": "p", "uid": "u", "generation": 1}
    return node(policy=policy, stable={"revision": revision, "spec": content}, **more)


def test_no_object_and_no_policy_are_the_same() -> None:
    gone = read_node(None, 77.0)
    assert gone.desired == Absent(77.0)
    assert gone.generation == -1
    bare = read_node(node(orphanGraceSeconds=5, reportIntervalSeconds=30), 77.0)
    assert bare.desired == Absent(5.0, 4)
    assert (bare.interval_seconds, bare.grace_seconds, bare.generation) == (30.0, 5.0, 4)


def test_a_revision_in_full() -> None:
    word = read_node(ruled(SPEC), 1.0)
    assert isinstance(word.desired, Wanted)
    assert (word.desired.revision, word.desired.policy) == (HASH, "p")
    assert word.desired.spec.durability == "none"
    assert word.problem is None


def test_an_unknown_field_at_its_default_changes_nothing() -> None:
    # A newer operator writes a section out whose default keeps the hash as it was.
    word = read_node(ruled({**SPEC, "prefetch": {"enabled": False}}), 1.0)
    assert isinstance(word.desired, Wanted)
    assert word.problem is None


def test_an_unknown_field_that_matters_is_refused_by_name() -> None:
    word = read_node(ruled({**SPEC, "prefetch": {"enabled": True}}, "f" * 64), 1.0)
    assert word.desired is None
    assert word.problem is not None
    assert word.problem.reason is Reason.UnknownFields
    assert "prefetch" in word.problem.message


def test_content_that_does_not_match_its_hash_is_refused() -> None:
    word = read_node(ruled(SPEC, "0" * 64), 1.0)
    assert word.desired is None
    assert word.problem is not None
    assert word.problem.reason is Reason.InvalidRevision


def test_a_revision_that_breaks_a_rule_is_refused_with_the_rules_sentence() -> None:
    word = read_node(ruled({**SPEC, "pressure": {"tightenPercent": 95, "demotePercent": 90}}), 1.0)
    assert word.desired is None
    assert word.problem is not None
    assert word.problem.reason is Reason.InvalidRevision
    assert "pressure" in word.problem.message


def test_nonsense_where_numbers_belong_falls_back_to_the_defaults() -> None:
    word = read_node(node(reportIntervalSeconds="often", orphanGraceSeconds=-1), 1.0)
    assert (word.interval_seconds, word.grace_seconds) == (10.0, 3600.0)


@pytest.mark.parametrize("junk", [None, "text", 7, [1], {"a": []}])
def test_no_object_takes_the_agent_down(junk: Any) -> None:
    spec = {"policy": {"name": "p"}, "stable": {"revision": HASH, "spec": SPEC}}
    bodies = [{"metadata": {"generation": 4}, "spec": {**spec, name: junk}} for name in SECTIONS]
    for body in [{"metadata": {"generation": 4}, "spec": junk}, *bodies]:
        word = read_node(body, 7.0)
        assert isinstance(word.desired, Absent | Wanted) or word.problem is not None
        assert word.interval_seconds > 0


SECTIONS = ("policy", "stable", "reportIntervalSeconds", "orphanGraceSeconds")
