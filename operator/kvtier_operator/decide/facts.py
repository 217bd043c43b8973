"""What the operator knows of the cluster: the fields that decisions use, and nothing else.

Facts are immutable. `observe.objects` makes them from what the API server sends; tests make them
directly. Two facts that are equal lead to the same decisions, which is what lets the store drop
events (a kubelet's heartbeat, an agent's counters) that change nothing here.

`moment` values are seconds since 1970; `version` is metadata.resourceVersion as a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvtier_api.conditions import Condition
from kvtier_api.policy import NodeSelector, PolicyStatus

__all__ = [
    "FIELD_MANAGER",
    "GENERATION_ANNOTATION",
    "POLICY_LABEL",
    "RECONCILE_ANNOTATION",
    "AgentReport",
    "CacheNode",
    "ClusterNode",
    "Policy",
    "PolicyRef",
    "StoredRevision",
]


FIELD_MANAGER: Final = "kvtier-operator"
"""Under this name the operator owns the fields that it applies."""
RECONCILE_ANNOTATION: Final = "kvtier.io/reconcile"
"""On a policy, by people: ``paused`` stops every write for it."""
POLICY_LABEL: Final = "kvtier.io/policy"
"""On a ControllerRevision: the name of its policy."""
GENERATION_ANNOTATION: Final = "kvtier.io/policy-generation"
"""On a ControllerRevision: the generation of the policy that it was made for."""


@dataclass(frozen=True, slots=True)
class PolicyRef:
    """``KVTierNode.spec.policy``."""

    name: str
    uid: str
    generation: int


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A core Node."""

    name: str
    uid: str
    labels: Mapping[str, str] = field(default_factory=dict)
    version: int = 0


@dataclass(frozen=True, slots=True)
class Policy:
    """A KVTierPolicy. ``problems`` is empty exactly when ``behaviour`` and ``revision`` hold."""

    name: str
    uid: str
    generation: int = 1
    created: str = ""
    """RFC 3339, UTC: sorts as time does."""
    deleting: bool = False
    hands_off: bool = False
    """The annotation ``kvtier.io/reconcile: paused`` is set."""
    selector: NodeSelector | None = None
    """None: not readable; the policy keeps the nodes that it has."""
    priority: int = 0
    paused: bool = False
    behaviour: Mapping[str, Any] | None = None
    """The behaviour sections in full, as they are written to revisions and nodes."""
    revision: str = ""
    problems: tuple[str, ...] = ()
    status: PolicyStatus = field(default_factory=PolicyStatus)
    version: int = 0


@dataclass(frozen=True, slots=True)
class AgentReport:
    """``KVTierNode.status``, by the agent."""

    observed_generation: int = -1
    revision: str = ""
    not_applied: tuple[str, ...] = ()
    ready: Condition | None = None
    stalled: Condition | None = None


@dataclass(frozen=True, slots=True)
class CacheNode:
    """A KVTierNode."""

    name: str
    uid: str
    generation: int = 1
    deleting: bool = False
    node_uid: str = ""
    policy: PolicyRef | None = None
    stable_revision: str = ""
    """Revision that the spec names; "" where its content is not what the name says."""
    stable_spec: Mapping[str, Any] | None = None
    orphaned_at: float | None = None
    report_interval: int = 0
    orphan_grace: int = -1
    shared: bool = False
    """Somebody else owns fields of the spec: an apply would leave those where they are."""
    report: AgentReport = field(default_factory=AgentReport)
    version: int = 0


@dataclass(frozen=True, slots=True)
class StoredRevision:
    """A ControllerRevision of ours. ``revision`` is the hash of its content as it stands there;
    "" where the content cannot be read."""

    name: str
    uid: str
    policy: str
    owner_uid: str
    number: int
    revision: str
    generation: int
    """Generation of the policy for which it was made."""
    behaviour: Mapping[str, Any]
