"""Which nodes a policy is for: a label selector, with the semantics that Kubernetes gives it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from kvtier_api import rules
from kvtier_api.model import ApiModel, knob
from kvtier_api.rule import Rule

LabelKey = Annotated[str, Field(min_length=1, max_length=317), rules.LABEL_KEY]
LabelValue = Annotated[str, Field(max_length=63), rules.LABEL_VALUE]


class MatchExpression(ApiModel):
    """One condition on a node's labels; all must hold."""

    RULES: ClassVar[tuple[Rule, ...]] = (rules.EXPRESSION_VALUES,)

    key: Annotated[LabelKey, knob("Key of the node label.", unit="label key")]
    operator: Annotated[
        Literal["In", "NotIn", "Exists", "DoesNotExist"],
        knob("How the label is compared: In, NotIn, Exists or DoesNotExist.", unit="name"),
    ]
    values: Annotated[
        tuple[LabelValue, ...],
        knob(
            "Values to compare with; for In and NotIn only.",
            unit="label values",
            list_type="atomic",
            max_length=64,
        ),
    ] = ()


class NodeSelector(ApiModel):
    """Which nodes a policy is for, by their labels; empty selects every node."""

    match_labels: Annotated[
        dict[LabelKey, LabelValue],
        knob(
            "Labels that a node must have, all of them.",
            unit="label key to label value",
            max_length=32,
        ),
    ] = Field(default={})
    match_expressions: Annotated[
        tuple[MatchExpression, ...],
        knob(
            "Further conditions on a node's labels, all of which must hold.",
            unit="list of conditions",
            list_type="atomic",
            max_length=32,
        ),
    ] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether a node with these labels is selected (Kubernetes label selector semantics)."""
        if any(labels.get(key) != value for key, value in self.match_labels.items()):
            return False
        return all(_holds(e, labels) for e in self.match_expressions)


def _holds(e: MatchExpression, labels: Mapping[str, str]) -> bool:
    match e.operator:
        case "In":
            return labels.get(e.key) in e.values
        case "NotIn":
            return labels.get(e.key) not in e.values
        case "Exists":
            return e.key in labels
        case "DoesNotExist":
            return e.key not in labels
