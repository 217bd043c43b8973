"""Which policy rules which node."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from kvtier_api.policy import NodeSelector
from kvtier_operator.decide.facts import ClusterNode, Policy
from kvtier_operator.decide.selection import candidates, describe


def test_priority_then_age_then_name(a_policy: Any, a_node: Any) -> None:
    node = a_node("n", gpu="h100")
    low = a_policy("a-low", priority=1, created="2026-01-01T00:00:00Z")
    old = a_policy("z-old", priority=5, created="2026-01-01T00:00:00Z")
    young = a_policy("b-young", priority=5, created="2026-02-01T00:00:00Z")
    twin = a_policy("a-twin", priority=5, created="2026-02-01T00:00:00Z")
    order = candidates(node, None, [low, young, old, twin])
    assert order == ("z-old", "a-twin", "b-young", "a-low")


def test_a_policy_that_is_being_deleted_selects_nothing(a_policy: Any, a_node: Any) -> None:
    assert candidates(a_node(), None, [a_policy("p", deleting=True)]) == ()


def test_a_selector_that_cannot_be_read_keeps_the_nodes_it_has(
    a_policy: Any, a_node: Any, a_cache: Any
) -> None:
    policy = a_policy("p", selector=None)
    blind = a_policy(
        "p", spec={"nodeSelector": {"matchExpressions": [{"key": "x", "operator": "Like"}]}}
    )
    assert blind.selector is None
    assert candidates(a_node("mine"), a_cache("mine", policy), [blind]) == ("p",)
    assert candidates(a_node("other"), a_cache("other"), [blind]) == ()


def test_selectors_in_words() -> None:
    selector = NodeSelector.read(
        {
            "matchLabels": {"b": "2", "a": "1"},
            "matchExpressions": [
                {"key": "zone", "operator": "In", "values": ["x", "y"]},
                {"key": "spot", "operator": "DoesNotExist"},
            ],
        }
    )
    assert describe(selector) == "a=1,b=2,zone in (x, y),!spot"
    assert describe(NodeSelector()) == "(every node)"


@given(
    ranks=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["2026-01-01", "2026-02-01"])), max_size=8
    ),
    seed=st.integers(),
)
def test_the_order_of_sight_does_not_matter(ranks: Any, seed: int) -> None:
    node = ClusterNode(name="n", uid="u")
    policies = [
        Policy(name=f"p{i}", uid=f"u{i}", priority=p, created=c, selector=NodeSelector())
        for i, (p, c) in enumerate(ranks)
    ]
    shuffled = list(policies)
    random.Random(seed).shuffle(shuffled)
    assert candidates(node, None, shuffled) == candidates(node, None, policies)
