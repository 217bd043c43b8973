"""``KVTierPolicy``: what people and GitOps write. The operator never edits its spec.

``RevisionSpec`` holds the sections that change what an agent does; a change there is a new
revision. ``PolicySpec`` adds what is control input only (which nodes, priority, rollout): in force
at once, never a revision.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StrictBool, computed_field
from pydantic.config import JsonDict

from kvtier_api import rules
from kvtier_api.conditions import MAX_CONDITIONS, Condition
from kvtier_api.meta import API_VERSION, ObjectMeta
from kvtier_api.model import ApiModel, knob, number
from kvtier_api.rule import Rule
from kvtier_api.sections import (
    SLO,
    DRAMTier,
    Durability,
    FrozenPrefix,
    HBMTier,
    NVMeTier,
    Page,
    Pressure,
    Replacement,
    TenantQuota,
    Tenants,
    Thresholds,
    Tiers,
    ValueDensity,
)
from kvtier_api.selector import MatchExpression, NodeSelector

__all__ = [
    "SLO",
    "DRAMTier",
    "Durability",
    "FrozenPrefix",
    "HBMTier",
    "KVTierPolicy",
    "MatchExpression",
    "NVMeTier",
    "NodeCounts",
    "NodeSelector",
    "Page",
    "PolicySpec",
    "PolicyStatus",
    "Pressure",
    "Replacement",
    "RevisionSpec",
    "Rollout",
    "Superseding",
    "TenantQuota",
    "Tenants",
    "Thresholds",
    "Tiers",
    "ValueDensity",
]

Revision = Annotated[str, Field(max_length=64, pattern="^([0-9a-f]{64})?$")]
Int64Max = 2**63 - 1
_SHOWN: JsonDict = {"kvtier": {"unit": "text", "absent": None}, "maxLength": 64}


class Rollout(ApiModel):
    """How a new revision reaches the nodes. Control input: never part of a revision."""

    strategy: Annotated[
        Literal["AllAtOnce"],
        knob("Order in which nodes get a new revision; AllAtOnce: all together.", unit="name"),
    ] = "AllAtOnce"
    paused: Annotated[
        StrictBool,
        knob(
            "While true, nodes stay on the revision that is active; new nodes get it too.",
            unit="true or false",
        ),
    ] = False


class RevisionSpec(ApiModel):
    """The sections that change what an agent does: the content of a revision."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        rules.NVME_THRESHOLD,
        rules.SYNC_NEEDS_NVME,
        rules.FROZEN_KEYS,
        rules.FROZEN_FIT,
        rules.QUOTA_NEEDS_NVME,
    )

    tiers: Annotated[Tiers, knob("Where pages are kept.", unit="section")] = Tiers()
    page: Annotated[Page, knob("The unit that is kept and moved.", unit="section")] = Page()
    value_density: Annotated[
        ValueDensity,
        knob("What keeping a page is worth, and the floor for each tier.", unit="section"),
    ]
    replacement: Annotated[Replacement, knob("Which pages make room.", unit="section")] = (
        Replacement()
    )
    pressure: Annotated[Pressure, knob("What happens as L0 fills.", unit="section")] = Pressure()
    frozen_prefixes: Annotated[
        tuple[FrozenPrefix, ...],
        knob(
            "Prefixes that stay in L0 (where the engine owns L0: in DRAM) whatever their value.",
            unit="list of prefixes, by name",
            list_type="map",
            keys=("name",),
            max_length=32,
        ),
    ] = ()
    tenants: Annotated[
        Tenants, knob("How much of each tier a tenant's pages may take.", unit="section")
    ] = Tenants()
    slo: Annotated[SLO, knob("Latency objective.", unit="section")] = SLO()
    durability: Annotated[
        Durability,
        knob(
            "What of L2 survives. none: nothing, there is no journal. async: after the end of the "
            "agent, also a kill, all that was stored; after a power cut what had reached the "
            "drive. sync: a page counts as stored only once it and its record are flushed.",
            unit="name",
        ),
    ] = "async"


class PolicySpec(RevisionSpec):
    """Desired state: which nodes, and what their caches do."""

    node_selector: Annotated[
        NodeSelector,
        knob("Nodes that the policy is for, by label.", unit="section"),
    ] = NodeSelector()
    priority: Annotated[
        int,
        number(
            "Where several policies select a node the higher priority rules; then the older "
            "policy; then the name that sorts first.",
            unit="rank without unit",
            ge=0,
            le=1_000_000,
        ),
    ] = 0
    rollout: Annotated[Rollout, knob("How a new revision reaches the nodes.", unit="section")] = (
        Rollout()
    )

    def behaviour(self) -> RevisionSpec:
        """The part that makes a revision."""
        return RevisionSpec.model_construct(
            _fields_set=self.model_fields_set & RevisionSpec.model_fields.keys(),
            **{name: getattr(self, name) for name in RevisionSpec.model_fields},
        )


class NodeCounts(ApiModel):
    """Nodes of the policy, counted."""

    selected: Annotated[
        int,
        number(
            "Nodes that this policy rules: it selects them, and no other policy wins.",
            unit="nodes",
            ge=0,
            le=10**6,
        ),
    ] = 0
    ready: Annotated[
        int, number("Ruled nodes whose agent says Ready.", unit="nodes", ge=0, le=10**6)
    ] = 0
    updated: Annotated[
        int,
        number("Ruled nodes with the desired revision in force.", unit="nodes", ge=0, le=10**6),
    ] = 0
    stale: Annotated[
        int,
        number(
            "Ruled nodes that have not reported for three intervals.",
            unit="nodes",
            ge=0,
            le=10**6,
        ),
    ] = 0

    @computed_field(description="Ready of selected, for tables.", json_schema_extra=_SHOWN)  # type: ignore[prop-decorator]
    @property
    def summary(self) -> str:
        return f"{self.ready}/{self.selected}"


class Superseding(ApiModel):
    """A node that another policy rules although this one selects it too."""

    node: Annotated[str, knob("Name of the node.", unit="name", max_length=253)]
    policy: Annotated[str, knob("Policy that rules it.", unit="name", max_length=253)]


class PolicyStatus(ApiModel):
    """Observed state, written by the operator alone."""

    RULES: ClassVar[tuple[Rule, ...]] = (rules.CONDITIONS_ROOM,)

    observed_generation: Annotated[
        int,
        number(
            "metadata.generation that this status is about; -1 before the operator saw it.",
            unit="generation",
            ge=-1,
            le=Int64Max,
        ),
    ] = -1
    active_revision: Annotated[
        Revision,
        knob(
            "Last revision that was in force on all ruled nodes; empty before the first. Where "
            "there are no nodes, the desired one.",
            unit="SHA-256, hex",
        ),
    ] = ""
    desired_revision: Annotated[
        Revision, knob("Revision that the spec asks for.", unit="SHA-256, hex")
    ] = ""
    nodes: Annotated[
        NodeCounts | None, knob("Counts of nodes.", unit="section", absent="not counted yet")
    ] = None
    superseded_by: Annotated[
        tuple[Superseding, ...],
        knob(
            "Nodes that this policy selects and another one rules; the first 50 by name.",
            unit="list of nodes",
            list_type="map",
            keys=("node",),
            max_length=50,
        ),
    ] = ()
    conditions: Annotated[
        tuple[Condition, ...],
        knob(
            "Ready, Reconciling and Stalled.",
            unit="list of conditions, by type",
            list_type="map",
            keys=("type",),
            max_length=MAX_CONDITIONS,
        ),
    ] = ()

    @computed_field(  # type: ignore[prop-decorator]
        description="First 10 digits of activeRevision, for tables.", json_schema_extra=_SHOWN
    )
    @property
    def short_revision(self) -> str:
        return self.active_revision[:10]


class KVTierPolicy(ApiModel):
    """How a KV cache in GPU memory, DRAM and NVMe behaves on the nodes that it selects."""

    RULES: ClassVar[tuple[Rule, ...]] = (rules.POLICY_NAME,)

    api_version: Literal["kvtier.io/v1alpha1"] = API_VERSION
    kind: Literal["KVTierPolicy"] = "KVTierPolicy"
    metadata: ObjectMeta
    spec: Annotated[PolicySpec, knob("Desired state, written by people and GitOps.")]
    status: Annotated[PolicyStatus, knob("Observed state, written by the operator.")] = (
        PolicyStatus()
    )
