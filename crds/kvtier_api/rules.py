"""Every rule about a policy, once: its CEL text, its sentence and the same test in Python.

The API server refuses a bad policy by the CEL text, ``kvtier policy validate`` and the operator's
reconciler by the Python predicate; all three say the same sentence, because there is only one.
A contract test feeds generated specs to both sides and compares the answers.

Two kinds:

- a ``ValueRule`` belongs to the *type* of a scalar (a volume name, a page key). It travels inside
  the field's annotation, so that every field of that type has it.
- a ``Rule`` belongs to an *object* and relates its fields. Each model lists its own in ``RULES``;
  ``field`` names the field the sentence is about, for the path in the message.

A sentence says what to write instead. It has no figures computed from the input, so that it reads
the same on every side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvtier_api import quantity
from kvtier_api.quantity import exact_size
from kvtier_api.rule import Rule, ValueRule, cel_matches, matches
from kvtier_api.sums import cel_sum_fits, sum_fits

if TYPE_CHECKING:
    from kvtier_api import node as n
    from kvtier_api import policy as p
    from kvtier_api.meta import ObjectMeta


# ---------------------------------------------------------------- values

SIZE: Final = ValueRule(
    "size",
    f"string(self).matches('{quantity.PATTERN}')",
    quantity.SENTENCE,
    quantity.is_size,
)

_NAME = "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
VOLUME_NAME: Final = ValueRule(
    "volume-name",
    cel_matches(_NAME),
    "a volume is named, never given as a host path: write the name of a volume that the chart "
    "mounts or --volume maps, such as data0 (lower-case letters, digits and -)",
    matches(_NAME),
)
PREFIX_NAME: Final = ValueRule(
    "prefix-name",
    cel_matches(_NAME),
    "write a name of lower-case letters, digits and -, such as support-bot-v3",
    matches(_NAME),
)
TENANT_NAME: Final = ValueRule(
    "tenant-name",
    cel_matches(_NAME),
    "write the name that its engines give, of lower-case letters, digits and -, such as search",
    matches(_NAME),
)
_PAGE_KEY = "^[0-9a-f]{32}$"
PAGE_KEY: Final = ValueRule(
    "page-key",
    cel_matches(_PAGE_KEY),
    "a page key is 32 lower-case hexadecimal digits (BLAKE2b-128), without 0x",
    matches(_PAGE_KEY),
)
_LABEL_KEY = (
    "^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
)
LABEL_KEY: Final = ValueRule(
    "label-key",
    cel_matches(_LABEL_KEY),
    "not the key of a label: write it as kubectl get nodes --show-labels does, such as "
    "nvidia.com/gpu.product",
    matches(_LABEL_KEY),
)
_LABEL_VALUE = "^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$"
LABEL_VALUE: Final = ValueRule(
    "label-value",
    cel_matches(_LABEL_VALUE),
    "not the value of a label: write at most 63 letters, digits, -, _ and ., such as "
    "NVIDIA-H100-80GB-HBM3",
    matches(_LABEL_VALUE),
)


# ---------------------------------------------------------------- relations


def _within(field: str, low: str, high: str) -> str:
    """CEL: an optional size lies between two quantities."""
    size = f"quantity(string(self.{field}))"
    return (
        f"!has(self.{field}) || ({size}.compareTo(quantity('{low}')) >= 0 && "
        f"{size}.compareTo(quantity('{high}')) <= 0)"
    )


def size_bounds(name: str, attribute: str, field: str, low: str, high: str, hint: str) -> Rule:
    """A rule that keeps the size in ``attribute`` (Python) / ``field`` (CRD) within bounds."""
    least, most = exact_size(low), exact_size(high)

    def check(model: Any) -> bool:
        value = getattr(model, attribute)
        return value is None or least <= value.exact <= most

    message = f"{field} must be between {low} and {high}: {hint}"
    return Rule(name, _within(field, low, high), message, check, field)


def _check_hbm_one(m: p.HBMTier) -> bool:
    return (m.percent_of_device is None) != (m.size is None)


HBM_ONE_OF: Final = Rule(
    "hbm-one-of",
    "has(self.percentOfDevice) != has(self.size)",
    "write exactly one of percentOfDevice and size: percentOfDevice: 20 or size: 16Gi",
    _check_hbm_one,
)


def _check_dram_one(m: p.DRAMTier) -> bool:
    return (m.ratio_to_hbm is None) != (m.size is None)


DRAM_ONE_OF: Final = Rule(
    "dram-one-of",
    "has(self.ratioToHBM) != has(self.size)",
    "write exactly one of ratioToHBM and size: ratioToHBM: 6 or size: 96Gi",
    _check_dram_one,
)

_HBM_MOST: Final = "16Ti"
HBM_SIZE: Final = size_bounds(
    "hbm-size", "size", "size", "1Mi", _HBM_MOST, "write the bytes of one node, such as 16Gi"
)
DRAM_SIZE: Final = size_bounds(
    "dram-size", "size", "size", "1Mi", "64Ti", "write the bytes of one node, such as 96Gi"
)
NVME_SIZE: Final = size_bounds(
    "nvme-size", "size", "size", "1Mi", "4Pi", "write the bytes of one node, such as 2Ti"
)
TRANSFER_SIZE: Final = size_bounds(
    "transfer-size",
    "transfer_size",
    "transferSize",
    "256Ki",
    "1Mi",
    "smaller transfers waste the drive, larger ones delay the first layer; write 1Mi",
)
FROZEN_SIZE: Final = size_bounds(
    "frozen-size",
    "max_size",
    "maxSize",
    "4Ki",
    _HBM_MOST,
    "write the bytes on one node, such as 2Gi",
)


def _check_page_tokens(m: p.Page) -> bool:
    return m.tokens % 16 == 0


PAGE_TOKENS: Final = Rule(
    "page-tokens",
    "self.tokens % 16 == 0",
    "tokens must be a multiple of 16, the block of serving engines: write 256",
    _check_page_tokens,
    "tokens",
)


def _check_pressure(m: p.Pressure) -> bool:
    return m.tighten_percent < m.demote_percent


PRESSURE_ORDER: Final = Rule(
    "pressure-order",
    "self.tightenPercent < self.demotePercent",
    "tightenPercent must be below demotePercent, so that tightening comes first: write "
    "tightenPercent: 90 and demotePercent: 95",
    _check_pressure,
    "tightenPercent",
)


def _check_expression(m: p.MatchExpression) -> bool:
    return (m.operator in ("In", "NotIn")) == (len(m.values) > 0)


EXPRESSION_VALUES: Final = Rule(
    "expression-values",
    "(self.operator in ['In', 'NotIn']) == (has(self.values) && size(self.values) > 0)",
    "In and NotIn need at least one entry in values; Exists and DoesNotExist take none",
    _check_expression,
    "values",
)


def _check_nvme_threshold(m: p.RevisionSpec) -> bool:
    thresholds = m.value_density.threshold_microseconds_per_mib
    return thresholds.nvme == 0 or m.tiers.nvme is not None


NVME_THRESHOLD: Final = Rule(
    "nvme-threshold",
    "self.valueDensity.thresholdMicrosecondsPerMiB.nvme == 0 || has(self.tiers.nvme)",
    "a threshold for nvme needs an NVMe tier: add tiers.nvme, or leave "
    "thresholdMicrosecondsPerMiB.nvme at 0",
    _check_nvme_threshold,
    "valueDensity.thresholdMicrosecondsPerMiB.nvme",
)


def _check_sync(m: p.RevisionSpec) -> bool:
    return m.durability != "sync" or m.tiers.nvme is not None


SYNC_NEEDS_NVME: Final = Rule(
    "sync-needs-nvme",
    "self.durability != 'sync' || has(self.tiers.nvme)",
    "durability: sync needs an NVMe tier to be durable on: add tiers.nvme, or write "
    "durability: none",
    _check_sync,
    "durability",
)

MAX_FROZEN_KEYS: Final = 4096


def _check_frozen_keys(m: p.RevisionSpec) -> bool:
    return sum(len(f.page_keys) for f in m.frozen_prefixes) <= MAX_FROZEN_KEYS


FROZEN_KEYS: Final = Rule(
    "frozen-keys",
    "self.frozenPrefixes.map(f, has(f.pageKeys) ? size(f.pageKeys) : 0).sum() <= "
    f"{MAX_FROZEN_KEYS}",
    f"at most {MAX_FROZEN_KEYS} page keys over all frozen prefixes: leave pageKeys out and let "
    "requests name the prefix instead",
    _check_frozen_keys,
    "frozenPrefixes",
)


def _check_frozen_fit(m: p.RevisionSpec) -> bool:
    tier = m.tiers.hbm.size
    return tier is None or sum_fits((f.max_size for f in m.frozen_prefixes), tier, _HBM_MOST)


FROZEN_FIT: Final = Rule(
    "frozen-fit",
    "!has(self.tiers.hbm.size) || "
    + cel_sum_fits("frozenPrefixes", "maxSize", "tiers.hbm.size", _HBM_MOST),
    "the maxSize of all frozen prefixes together must fit into tiers.hbm.size: make the tier "
    "larger, or freeze less",
    _check_frozen_fit,
    "frozenPrefixes",
)


def _check_quota(m: p.TenantQuota) -> bool:
    return not (m.hbm_percent is None and m.dram_percent is None and m.nvme_percent is None)


QUOTA_BOUND: Final = Rule(
    "quota-bound",
    "has(self.hbmPercent) || has(self.dramPercent) || has(self.nvmePercent)",
    "a quota bounds one tier at least: write hbmPercent, dramPercent or nvmePercent, such as "
    "nvmePercent: 40",
    _check_quota,
)


def _check_nvme_quota(m: p.RevisionSpec) -> bool:
    return m.tiers.nvme is not None or all(q.nvme_percent is None for q in m.tenants.quotas)


QUOTA_NEEDS_NVME: Final = Rule(
    "quota-needs-nvme",
    "has(self.tiers.nvme) || !self.tenants.quotas.exists(q, has(q.nvmePercent))",
    "a quota of nvme needs an NVMe tier: add tiers.nvme, or leave nvmePercent out",
    _check_nvme_quota,
    "tenants",
)


OWN_CONDITIONS: Final = ("Ready", "Reconciling", "Stalled", "Clamped")
MAX_FOREIGN_CONDITIONS: Final = 28


def _check_room(m: p.PolicyStatus | n.NodeStatus) -> bool:
    return sum(c.type not in OWN_CONDITIONS for c in m.conditions) <= MAX_FOREIGN_CONDITIONS


CONDITIONS_ROOM: Final = Rule(
    "conditions-room",
    "!has(self.conditions) || self.conditions.filter(c, "
    f"!(c.type in {list(OWN_CONDITIONS)})).size() <= {MAX_FOREIGN_CONDITIONS}",
    f"at most {MAX_FOREIGN_CONDITIONS} conditions of other controllers, so that there is always "
    "room for kvtier's own: remove one before you add another",
    _check_room,
    "conditions",
)


def _check_stable(m: n.NodeSpec) -> bool:
    return m.stable is None or m.policy is not None


STABLE_NEEDS_POLICY: Final = Rule(
    "stable-needs-policy",
    "!has(self.stable) || has(self.policy)",
    "a revision comes from a policy: write policy beside stable, or leave both out",
    _check_stable,
    "stable",
)

MAX_NAME: Final = 63


def _check_name(metadata: ObjectMeta) -> bool:
    return len(metadata.name) <= MAX_NAME


POLICY_NAME: Final = Rule(
    "policy-name",
    f"size(self.metadata.name) <= {MAX_NAME}",
    f"the name of a policy has at most {MAX_NAME} characters, because its revisions and labels "
    "are named after it: write a shorter one",
    lambda policy: _check_name(policy.metadata),
    "metadata.name",
)
