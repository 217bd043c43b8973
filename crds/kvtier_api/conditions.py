"""Conditions in the manner of Kubernetes: one entry per type, with the time of the last change."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import Field

from kvtier_api.model import ApiModel, knob, number
from kvtier_api.reasons import Reason

ConditionStatus = Literal["True", "False", "Unknown"]
Timestamp = Annotated[str, Field(max_length=40, json_schema_extra={"format": "date-time"})]
MAX_MESSAGE = 1024
"""Characters of a message of ours; other controllers may write as long ones as Kubernetes lets."""
MAX_CONDITIONS = 32

# The bounds of Kubernetes' own metav1.Condition: other controllers keep their conditions here too.
_TYPE = (
    r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
    r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$"
)
_REASON = r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"
_MAX_TYPE, _MAX_REASON, _MAX_FOREIGN_MESSAGE = 316, 1024, 32768


def timestamp(seconds: float) -> str:
    """RFC 3339, UTC, whole seconds, from seconds since 1970."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_timestamp(text: str) -> float:
    """Seconds since 1970 of an RFC 3339 text. Raises ``ValueError``."""
    return datetime.fromisoformat(text).timestamp()


class Condition(ApiModel):
    """One aspect of an object's state."""

    type: Annotated[
        str,
        knob("Name of the condition.", unit="name", max_length=_MAX_TYPE, pattern=_TYPE),
    ]
    status: Annotated[ConditionStatus, knob("True, False or Unknown.", unit="name")]
    observed_generation: Annotated[
        int | None,
        number(
            "metadata.generation that the condition is about.",
            unit="generation",
            ge=-1,
            le=2**63 - 1,
            absent="not tied to a generation",
        ),
    ] = None
    last_transition_time: Annotated[
        Timestamp, knob("When status last changed.", unit="RFC 3339 time")
    ]
    reason: Annotated[
        str,
        knob("Why, in one word.", unit="name", max_length=_MAX_REASON, pattern=_REASON),
    ]
    message: Annotated[
        str, knob("Why, in a sentence.", unit="text", max_length=_MAX_FOREIGN_MESSAGE)
    ] = ""


def find(conditions: Iterable[Condition], type_: str) -> Condition | None:
    return next((c for c in conditions if c.type == type_), None)


def is_true(conditions: Iterable[Condition], type_: str) -> bool:
    found = find(conditions, type_)
    return found is not None and found.status == "True"


def with_condition(
    conditions: Iterable[Condition],
    type_: str,
    status: ConditionStatus,
    reason: Reason,
    message: str,
    *,
    now: float,
    generation: int | None = None,
) -> tuple[Condition, ...]:
    """The same conditions with one set; its transition time moves only when status changes.

    ``now``: seconds since 1970. A message longer than the API allows is cut, marked by an
    ellipsis. The order of types is kept, a new type goes last.
    """
    old = tuple(conditions)
    before = find(old, type_)
    since = before.last_transition_time if before and before.status == status else timestamp(now)
    if len(message) > MAX_MESSAGE:
        message = message[: MAX_MESSAGE - 1] + "…"
    new = Condition(
        type=type_,
        status=status,
        observed_generation=generation,
        last_transition_time=since,
        reason=reason.value,
        message=message,
    )
    if before is None:
        return (*old, new)
    return tuple(new if c.type == type_ else c for c in old)
