"""``KVTierNode``: one per node, named after it. Spec by the operator, status by its agent."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, computed_field
from pydantic.fields import FieldInfo

from kvtier_api import rules
from kvtier_api.conditions import MAX_CONDITIONS, Condition, Timestamp
from kvtier_api.meta import API_VERSION, ObjectMeta
from kvtier_api.model import ApiModel, knob, number
from kvtier_api.policy import Int64Max, Revision, RevisionSpec
from kvtier_api.rule import Rule

Name = Annotated[str, Field(max_length=253)]
Uid = Annotated[str, Field(max_length=64)]


class PolicyReference(ApiModel):
    """The policy that rules the node."""

    name: Annotated[Name, knob("Name of the policy.", unit="name", min_length=1)]
    uid: Annotated[Uid, knob("metadata.uid of the policy.", unit="UID")]
    generation: Annotated[
        int,
        number(
            "metadata.generation of the policy that led to this spec.",
            unit="generation",
            ge=0,
            le=Int64Max,
        ),
    ]


class RevisionRef(ApiModel):
    """A revision in full, so that an agent needs no second read."""

    revision: Annotated[
        str,
        knob("Hash of spec.", unit="SHA-256, hex", max_length=64, pattern="^[0-9a-f]{64}$"),
    ]
    spec: Annotated[RevisionSpec, knob("What the agent does.", unit="section")]


class NodeSpec(ApiModel):
    """Desired state of one node's cache, written by the operator alone."""

    RULES: ClassVar[tuple[Rule, ...]] = (rules.STABLE_NEEDS_POLICY,)

    node_uid: Annotated[
        Uid | None,
        knob(
            "metadata.uid of the Node; a node that was made anew is another one.",
            unit="UID",
            absent="not known",
        ),
    ] = None
    policy: Annotated[
        PolicyReference | None,
        knob(
            "Policy that rules the node.",
            unit="section",
            absent="none: the agent serves what it holds and admits nothing",
        ),
    ] = None
    stable: Annotated[
        RevisionRef | None,
        knob(
            "Revision that is to be in force.",
            unit="section",
            absent="none: the agent serves what it holds and admits nothing",
        ),
    ] = None
    orphaned_at: Annotated[
        Timestamp | None,
        knob(
            "When the last policy let go of the node, by the operator's clock; agent and operator "
            "count orphanGraceSeconds by clocks that never jump.",
            unit="RFC 3339 time",
            absent="a policy rules the node",
        ),
    ] = None
    report_interval_seconds: Annotated[
        int,
        number(
            "Time between two reports of the agent, when nothing urgent happened.",
            unit="seconds",
            ge=1,
            le=3600,
        ),
    ] = 10
    orphan_grace_seconds: Annotated[
        int,
        number(
            "Time during which an agent without a policy keeps its pages.",
            unit="seconds",
            ge=0,
            le=604_800,
        ),
    ] = 3600


def _count(text: str, unit: str) -> FieldInfo:
    return number(text, unit=unit, ge=0, le=Int64Max)


class TierStatus(ApiModel):
    """Use of one tier."""

    name: Annotated[
        Literal["hbm", "dram", "nvme"], knob("Tier: hbm (L0), dram (L1), nvme (L2).", unit="name")
    ]
    capacity_bytes: Annotated[int, _count("Bytes the tier may hold, after clamping.", "bytes")]
    used_bytes: Annotated[int, _count("Bytes that pages take.", "bytes")] = 0
    pages: Annotated[int, _count("Pages in the tier.", "pages")] = 0

    @computed_field(  # type: ignore[prop-decorator]
        description="Share of the tier in use, rounded down.",
        json_schema_extra={"kvtier": {"unit": "percent", "absent": None}},
    )
    @property
    def used_percent(self) -> int:
        return self.used_bytes * 100 // self.capacity_bytes if self.capacity_bytes else 0


class Counters(ApiModel):
    """Cumulative over the agent's restarts on this node; never go down while bootID is the same."""

    hits_l0: Annotated[int, _count("Pages delivered from L0.", "pages")] = 0
    hits_l1: Annotated[int, _count("Pages delivered from L1.", "pages")] = 0
    hits_l2: Annotated[int, _count("Pages delivered from L2.", "pages")] = 0
    misses: Annotated[
        int,
        _count(
            "Pages asked for that engines had to compute: not held, not worth loading, late, bad.",
            "pages",
        ),
    ] = 0
    hit_tokens: Annotated[int, _count("Tokens that were not recomputed.", "tokens")] = 0
    miss_tokens: Annotated[int, _count("Tokens that were recomputed.", "tokens")] = 0
    pages_stored: Annotated[int, _count("Pages that engines committed.", "pages")] = 0
    refused_pages: Annotated[
        int,
        _count(
            "Pages not taken: for value, for space, for a quota, or because no policy is in force.",
            "pages",
        ),
    ] = 0
    evicted_pages: Annotated[
        int, _count("Pages lost from the cache, in whatever tier they were.", "pages")
    ] = 0
    demoted_pages: Annotated[int, _count("Pages moved down one tier.", "pages")] = 0
    promoted_pages: Annotated[int, _count("Pages moved up into L0.", "pages")] = 0
    nvme_bytes_written: Annotated[int, _count("Bytes written to L2.", "bytes")] = 0
    nvme_bytes_read: Annotated[int, _count("Bytes read from L2.", "bytes")] = 0
    quarantined_pages: Annotated[
        int, _count("Pages whose checksum was wrong; served as misses.", "pages")
    ] = 0
    failed_moves: Annotated[int, _count("Copies between tiers that failed.", "pages")] = 0


class NodeStatus(ApiModel):
    """Observed state, written by the agent of the node alone."""

    RULES: ClassVar[tuple[Rule, ...]] = (rules.CONDITIONS_ROOM,)

    observed_generation: Annotated[
        int,
        number(
            "metadata.generation of the spec that this status is about; -1 before an agent saw it.",
            unit="generation",
            ge=-1,
            le=Int64Max,
        ),
    ] = -1
    agent_version: Annotated[str, knob("Version of the agent.", unit="version", max_length=64)] = ""
    boot_id: Annotated[
        str, knob("Changes with every start of the agent.", unit="UID", max_length=64)
    ] = ""
    last_report_time: Annotated[
        Timestamp | None,
        knob("When the agent last reported.", unit="RFC 3339 time", absent="never reported"),
    ] = None
    revision: Annotated[
        Revision, knob("Revision in force; empty when none is.", unit="SHA-256, hex")
    ] = ""
    not_applied: Annotated[
        tuple[Annotated[str, Field(max_length=256)], ...],
        knob(
            "Fields of the revision that cannot be obeyed on this node.",
            unit="field paths",
            list_type="set",
            max_length=64,
        ),
    ] = ()
    tiers: Annotated[
        tuple[TierStatus, ...],
        knob(
            "Use of each tier.", unit="list of tiers", list_type="map", keys=("name",), max_length=3
        ),
    ] = ()
    counters: Annotated[
        Counters | None,
        knob("Cumulative counts.", unit="section", absent="not reported yet"),
    ] = None
    conditions: Annotated[
        tuple[Condition, ...],
        knob(
            "Ready, Clamped and Stalled.",
            unit="list of conditions, by type",
            list_type="map",
            keys=("type",),
            max_length=MAX_CONDITIONS,
        ),
    ] = ()

    @computed_field(  # type: ignore[prop-decorator]
        description="First 10 digits of revision, for tables.",
        json_schema_extra={"kvtier": {"unit": "text", "absent": None}, "maxLength": 64},
    )
    @property
    def short_revision(self) -> str:
        return self.revision[:10]


class KVTierNode(ApiModel):
    """The KV cache of one node: what it is to do, and what it does."""

    api_version: Literal["kvtier.io/v1alpha1"] = API_VERSION
    kind: Literal["KVTierNode"] = "KVTierNode"
    metadata: ObjectMeta
    spec: Annotated[NodeSpec, knob("Desired state, written by the operator.")] = NodeSpec()
    status: Annotated[NodeStatus, knob("Observed state, written by the node's agent.")] = (
        NodeStatus()
    )
