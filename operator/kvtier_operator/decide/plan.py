"""What is to be done: typed actions, in order, and when to look again.

A plan is a value. It is computed from inputs alone, so that applying it to the cluster and planning
again gives an empty plan; tests hold that for generated clusters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtier_api.reasons import Reason

__all__ = [
    "Action",
    "ApplyNode",
    "ApplyStatus",
    "DeleteNode",
    "DropRevision",
    "EmitEvent",
    "Plan",
    "StoreRevision",
]


@dataclass(frozen=True, slots=True)
class ApplyNode:
    """Server-side apply of a KVTierNode's spec. ``uid``/``version`` of what was read; empty and 0
    where it does not exist. ``whole``: replace the spec instead, with what others put into it."""

    name: str
    spec: Mapping[str, Any]
    uid: str = ""
    version: int = 0
    whole: bool = False


@dataclass(frozen=True, slots=True)
class DeleteNode:
    """Delete that very KVTierNode."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class StoreRevision:
    """Create a ControllerRevision owned by a policy."""

    name: str
    policy: str
    policy_uid: str
    generation: int
    number: int
    revision: str
    behaviour: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DropRevision:
    """Delete that very ControllerRevision."""

    name: str
    policy: str
    uid: str


@dataclass(frozen=True, slots=True)
class EmitEvent:
    """An event about a policy. ``name`` is made from what happened, so that the same transition is
    told once however often it is planned."""

    name: str
    policy: str
    policy_uid: str
    warning: bool
    reason: Reason
    note: str


@dataclass(frozen=True, slots=True)
class ApplyStatus:
    """Server-side apply of a policy's status, refused where the policy moved on meanwhile."""

    policy: str
    version: int
    status: Mapping[str, Any]


Action = ApplyNode | DeleteNode | StoreRevision | DropRevision | EmitEvent | ApplyStatus


@dataclass(frozen=True, slots=True)
class Plan:
    """``why`` is for the log and for tests: the rule that decided."""

    why: str
    actions: tuple[Action, ...] = ()
    look_again_after: float | None = None
    """Seconds; None: only when something changes."""
