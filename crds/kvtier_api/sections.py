"""The sections of a policy that change what an agent does, in the order of the reference.

A released default never changes within an API version. Where the best default is still to come,
the field has none: ``valueDensity.model`` must be written, so that a default given later
cannot change what an existing policy means.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from kvtier_api import rules
from kvtier_api.model import ApiModel, knob, number
from kvtier_api.quantity import Quantity
from kvtier_api.rule import Rule

VolumeName = Annotated[str, Field(min_length=1, max_length=253), rules.VOLUME_NAME]
PageKey = Annotated[str, Field(min_length=1, max_length=64), rules.PAGE_KEY]
Durability = Literal["none", "async", "sync"]


class HBMTier(ApiModel):
    """L0, memory of the GPU: a share of the device or a size."""

    RULES: ClassVar[tuple[Rule, ...]] = (rules.HBM_ONE_OF, rules.HBM_SIZE)

    percent_of_device: Annotated[
        int | None,
        number(
            "Share of device memory that L0 takes: of the first device that the agent sees, on "
            "which an L0 of its own lies; where the engines own L0, of all devices together, until "
            "they have registered their pools. 20 follows the split 60 weights, 15 activations, "
            "20 KV cache, 5 reserve.",
            unit="percent of device memory",
            ge=1,
            le=90,
            absent="size holds; without hbm at all it is 20",
        ),
    ] = None
    size: Annotated[
        Quantity | None,
        knob(
            "Size of L0 on the node, instead of percentOfDevice. One of the agent's own lies on "
            "the first device and cannot be larger.",
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
        knob(
            "L0, the memory of the GPU: percentOfDevice or size.",
            unit="percent of device memory, or bytes",
        ),
    ] = HBMTier(percent_of_device=20)
    dram: Annotated[
        DRAMTier,
        knob(
            "L1, the memory of the host: ratioToHBM or size.",
            unit="bytes of DRAM per byte of HBM, or bytes",
        ),
    ] = DRAMTier(ratio_to_hbm=6)
    nvme: Annotated[
        NVMeTier | None,
        knob(
            "L2, files on local drives: size and volumes.",
            unit="bytes",
            absent="no L2, what leaves L1 is recomputed",
        ),
    ] = None


class Page(ApiModel):
    """The unit that is kept, moved and dropped as one."""

    RULES: ClassVar[tuple[Rule, ...]] = (rules.PAGE_TOKENS, rules.TRANSFER_SIZE)

    tokens: Annotated[
        int,
        number(
            "Tokens of one page: a multiple of 16 and of the engine's block. Engines choose it "
            "at their start; a node whose engines have another size lists page.tokens in "
            "status.notApplied.",
            unit="tokens",
            ge=16,
            le=8192,
        ),
    ] = 256
    transfer_size: Annotated[
        Quantity,
        knob(
            "Most bytes of a page that count as one transfer, P in the load time by which value "
            "and SLO are judged: bytes / bandwidth + overhead * ceil(bytes / P).",
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
            ge=10,
            le=99,
        ),
    ] = 90
    demote_percent: Annotated[
        int,
        number(
            "Fill of L0 from which on every page that is neither pinned nor frozen is demoted.",
            unit="percent of L0",
            ge=11,
            le=100,
        ),
    ] = 95


class FrozenPrefix(ApiModel):
    """A prefix that stays in L0 (where the engine owns L0: in DRAM) whatever its value, such as a
    system prompt."""

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


class TenantQuota(ApiModel):
    """Most that one tenant's pages may take."""

    RULES: ClassVar[tuple[Rule, ...]] = (rules.QUOTA_BOUND,)

    tenant: Annotated[
        str,
        Field(min_length=1, max_length=63),
        rules.TENANT_NAME,
        knob("Name that the tenant's engines give when they connect.", unit="name"),
    ]
    hbm_percent: Annotated[
        int | None,
        number(
            "Most of L0 that the tenant's pages may take on a node; above it they go to L1.",
            unit="percent of L0",
            ge=0,
            le=100,
            absent="no bound",
        ),
    ] = None
    dram_percent: Annotated[
        int | None,
        number(
            "Most of L1 that the tenant's pages may take on a node.",
            unit="percent of L1",
            ge=0,
            le=100,
            absent="no bound",
        ),
    ] = None
    nvme_percent: Annotated[
        int | None,
        number(
            "Most of L2 that the tenant's pages may take on a node.",
            unit="percent of L2",
            ge=0,
            le=100,
            absent="no bound",
        ),
    ] = None


class Tenants(ApiModel):
    """Whose pages may take how much. Names are what engines say, and nobody vouches for them but
    the group of the socket: this is accounting, not security."""

    quotas: Annotated[
        tuple[TenantQuota, ...],
        knob(
            "Bounds by tenant; a tenant at its bound replaces its own coldest pages. Tenants that "
            "are not listed have none.",
            unit="list of quotas, by tenant",
            list_type="map",
            keys=("tenant",),
            max_length=32,
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
