"""``KVTierPolicy``: what people and GitOps write. The operator never edits its spec.

``RevisionSpec`` holds the sections that change what an agent does; a change there is a new
revision. ``PolicySpec`` adds what is control input only (which nodes, priority, rollout): in force
at once, never a revision.

A released default never changes within an API version. Where the best default is still to come,
the field has none: ``valueDensity.model`` must be written.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StrictBool, computed_field
from pydantic.config import JsonDict

from kvtier_api import rules
from kvtier_api.conditions import Condition
from kvtier_api.meta import API_VERSION, ObjectMeta
from kvtier_api.model import ApiModel, knob, number
from kvtier_api.quantity import Quantity
from kvtier_api.rules import Rule

LabelKey = Annotated[str, Field(min_length=1, max_length=317), rules.LABEL_KEY]
LabelValue = Annotated[str, Field(max_length=63), rules.LABEL_VALUE]
VolumeName = Annotated[str, Field(min_length=1, max_length=253), rules.VOLUME_NAME]
PageKey = Annotated[str, Field(min_length=1, max_length=64), rules.PAGE_KEY]
Revision = Annotated[str, Field(max_length=64, pattern="^([0-9a-f]{64})?$")]
Int64Max = 2**63 - 1
_SHOWN: JsonDict = {"kvtier": {"unit": "text", "absent": None}, "maxLength": 64}


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
    ] = Field(default_factory=dict)
    match_expressions: Annotated[
        tuple[MatchExpression, ...],
        knob(
            "Further conditions on a node's labels, all of which must hold.",
            unit="list of conditions",
            list_type="atomic",
            max_length=32,
        ),
    ] = ()

    def matches(self, labels: dict[str, str]) -> bool:
        """Whether a node with these labels is selected (Kubernetes label selector semantics)."""
        if any(labels.get(key) != value for key, value in self.match_labels.items()):
            return False
        return all(_holds(e, labels) for e in self.match_expressions)


def _holds(e: MatchExpression, labels: dict[str, str]) -> bool:
    match e.operator:
        case "In":
            return labels.get(e.key) in e.values
        case "NotIn":
            return labels.get(e.key) not in e.values
        case "Exists":
            return e.key in labels
        case "DoesNotExist":
            return e.key not in labels


class HBMTier(ApiModel):
    """L0, memory of the GPU: a share of the device or a size."""

    RULES: ClassVar[tuple[Rule, ...]] = (rules.HBM_ONE_OF, rules.HBM_SIZE)

    percent_of_device: Annotated[
        int | None,
        number(
            "Share of the memory of every device of the node that L0 takes. 20 follows the split "
            "60 weights, 15 activations, 20 KV cache, 5 reserve.",
            unit="percent of device memory",
            ge=1,
            le=90,
            absent="size holds; without hbm at all it is 20",
        ),
    ] = None
    size: Annotated[
        Quantity | None,
        knob(
            "Size of L0 over all devices of the node, instead of percentOfDevice.",
            unit="bytes, as a quantity (1Mi to 16Ti)",
            absent="percentOfDevice holds",
        ),
    ] = None


class DRAMTier(ApiModel):
    """L1, memory of the host: a multiple of L0 or a size."""

    RULES: ClassVar[tuple[Rule, ...]] = (rules.DRAM_ONE_OF, rules.DRAM_SIZE)

    ratio_to_hbm: Annotated[
        int | None,
        number(
            "Bytes of L1 for each byte of L0; 4 to 8 is advised.",
            unit="bytes of DRAM per byte of HBM",
            ge=1,
            le=64,
            absent="size holds; without dram at all it is 6",
        ),
    ] = None
    size: Annotated[
        Quantity | None,
        knob(
            "Size of L1 on the node, instead of ratioToHBM.",
            unit="bytes, as a quantity (1Mi to 64Ti)",
            absent="ratioToHBM holds",
        ),
    ] = None


class NVMeTier(ApiModel):
    """L2, files on local drives."""

    RULES: ClassVar[tuple[Rule, ...]] = (rules.NVME_SIZE,)

    size: Annotated[
        Quantity,
        knob(
            "Hard cap on the bytes that L2 may take on the node, over all volumes.",
            unit="bytes, as a quantity (1Mi to 4Pi)",
        ),
    ]
    volumes: Annotated[
        tuple[VolumeName, ...],
        knob(
            "Volumes to spread L2 over, by the names that the chart mounts or --volume maps; "
            "never host paths.",
            unit="volume names",
            list_type="set",
            min_length=1,
            max_length=16,
        ),
    ]
    reserve_percent: Annotated[
        int,
        number(
            "Share of each volume's file system that stays free, whatever size says.",
            unit="percent of the file system",
            ge=0,
            le=50,
        ),
    ] = 10


class Tiers(ApiModel):
    """Where pages are kept, and how much of it."""

    hbm: Annotated[
        HBMTier,
        knob("L0, the memory of the GPU: percentOfDevice or size.", unit="section"),
    ] = HBMTier(percent_of_device=20)
    dram: Annotated[
        DRAMTier,
        knob("L1, the memory of the host: ratioToHBM or size.", unit="section"),
    ] = DRAMTier(ratio_to_hbm=6)
    nvme: Annotated[
        NVMeTier | None,
        knob("L2, local drives.", unit="section", absent="no L2: what leaves L1 is recomputed"),
    ] = None


class Page(ApiModel):
    """The unit that is kept, moved and dropped as one."""

    RULES: ClassVar[tuple[Rule, ...]] = (rules.PAGE_TOKENS, rules.TRANSFER_SIZE)

    tokens: Annotated[
        int,
        number(
            "Tokens of one page: a multiple of 16 and of the engine's block.",
            unit="tokens",
            ge=16,
            le=8192,
        ),
    ] = 256
    transfer_size: Annotated[
        Quantity,
        knob(
            "Most bytes of a page that one input or output operation moves: a group of whole "
            "layers.",
            unit="bytes, as a quantity (256Ki to 1Mi)",
        ),
    ] = Quantity("1Mi")


class Thresholds(ApiModel):
    """Least value density for a page to enter a tier."""

    hbm: Annotated[
        int,
        number(
            "Least value density of a page that enters L0; 0 admits all.",
            unit="microseconds saved per MiB",
            ge=0,
            le=10**9,
        ),
    ] = 0
    dram: Annotated[
        int,
        number(
            "Least value density of a page that enters L1; 0 admits all.",
            unit="microseconds saved per MiB",
            ge=0,
            le=10**9,
        ),
    ] = 0
    nvme: Annotated[
        int,
        number(
            "Least value density of a page that enters L2; 0 admits all.",
            unit="microseconds saved per MiB",
            ge=0,
            le=10**9,
        ),
    ] = 0


class ValueDensity(ApiModel):
    """What keeping a page is expected to save, per byte."""

    model: Annotated[
        Literal["classic"],
        knob(
            "How value is computed. classic: V = p * T_recompute - T_load, V / size.",
            unit="name of a model",
        ),
    ]
    threshold_microseconds_per_mib: Annotated[
        Thresholds,
        knob("Floor on the value density per tier.", unit="section"),
    ] = Thresholds()
    prior_reuse_percent: Annotated[
        int,
        number(
            "Probability p that a page is used again, before there is history.",
            unit="percent",
            ge=1,
            le=100,
        ),
    ] = 30


class Replacement(ApiModel):
    """Which pages make room: least recently used first, tier by tier."""

    cool_down_seconds: Annotated[
        int,
        number(
            "Time during which a page that was demoted does not come back up.",
            unit="seconds",
            ge=0,
            le=3600,
        ),
    ] = 5


class Pressure(ApiModel):
    """What happens as L0 fills."""

    RULES: ClassVar[tuple[Rule, ...]] = (rules.PRESSURE_ORDER,)

    tighten_percent: Annotated[
        int,
        number(
            "Fill of L0 from which on thresholds tighten and a warning is given.",
            unit="percent of L0",
            ge=1,
            le=99,
        ),
    ] = 90
    demote_percent: Annotated[
        int,
        number(
            "Fill of L0 from which on every page that is neither pinned nor frozen is demoted.",
            unit="percent of L0",
            ge=2,
            le=100,
        ),
    ] = 95


class FrozenPrefix(ApiModel):
    """A prefix that stays in L0 whatever its value, such as a system prompt."""

    RULES: ClassVar[tuple[Rule, ...]] = (rules.FROZEN_SIZE,)

    name: Annotated[
        str,
        Field(min_length=1, max_length=63),
        rules.PREFIX_NAME,
        knob("Name of the prefix; requests refer to it.", unit="name"),
    ]
    max_size: Annotated[
        Quantity,
        knob(
            "Most bytes that stay frozen on a node; pages beyond it are ordinary ones.",
            unit="bytes, as a quantity (4Ki to 16Ti)",
        ),
    ]
    page_keys: Annotated[
        tuple[PageKey, ...],
        knob(
            "Pages that belong to the prefix, by key.",
            unit="page keys, 32 hexadecimal digits each",
            list_type="set",
            max_length=1024,
        ),
    ] = ()


class SLO(ApiModel):
    """What a request may wait for."""

    ttft_p99_milliseconds: Annotated[
        int | None,
        number(
            "Objective for the 99th percentile of time to first token. A page is loaded only if "
            "loading and the forward pass fit into it; a request may carry its own.",
            unit="milliseconds",
            ge=1,
            le=600_000,
            absent="no objective: load whenever loading is faster than recompute",
        ),
    ] = None


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


Durability = Literal["none", "async", "sync"]


class RevisionSpec(ApiModel):
    """The sections that change what an agent does: the content of a revision."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        rules.NVME_THRESHOLD,
        rules.SYNC_NEEDS_NVME,
        rules.FROZEN_KEYS,
        rules.FROZEN_FIT,
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
            "Prefixes that stay in L0 whatever their value.",
            unit="list of prefixes, by name",
            list_type="map",
            keys=("name",),
            max_length=32,
        ),
    ] = ()
    slo: Annotated[SLO, knob("Latency objective.", unit="section")] = SLO()
    durability: Annotated[
        Durability,
        knob(
            "What of L2 survives a restart of the agent. none: nothing. async: what was written, "
            "found again by the headers of the pages. sync: a page counts as stored in L2 only "
            "once it is flushed to the drive.",
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
        int, number("Nodes that this policy rules.", unit="nodes", ge=0, le=10**6)
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
        knob("Revision in force on all ruled nodes; empty before the first.", unit="SHA-256, hex"),
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
            max_length=16,
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
