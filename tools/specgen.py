"""Hypothesis strategies for policy specs, as they stand in YAML.

``specs()`` obeys the schema and wanders around the edges of every rule, so that about half of what
it draws breaks one or more; ``valid_specs()`` breaks none. Used by the tests of rules and hashes.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from kvtier_api.validate import validate

Spec = dict[str, Any]

_SUFFIXES = ["", "k", "M", "G", "T", "Ki", "Mi", "Gi", "Ti", "Pi"]


def _section(required: dict[str, Any], optional: dict[str, Any]) -> st.SearchStrategy[Spec]:
    return st.fixed_dictionaries(required, optional=optional)


def sizes(*likely: str) -> st.SearchStrategy[str | int]:
    """Sizes: mostly ``likely`` ones, else anything of the grammar, now and then beyond it."""
    decimals = st.builds(
        lambda whole, part, suffix: f"{whole}{part}{suffix}",
        st.integers(0, 5000),
        st.sampled_from(["", "", "", ".5", ".000001"]),
        st.sampled_from(_SUFFIXES),
    )
    wrong = st.sampled_from(
        ["", "16GB", "1.Gi", "-1Gi", "1e9", "500m", "16 Gi", "\u0661Gi", "1Gi\n"]
    )
    known = st.sampled_from(likely)
    return st.one_of(known, known, known, decimals, st.integers(0, 2**50), wrong)


_names = st.one_of(
    st.text("abz019-", min_size=1, max_size=8),
    st.sampled_from(["/mnt/data0", "Data0", "data_0", "-a", "a-", "a" * 63, "a.b"]),
)
_keys = st.one_of(
    st.integers(0, 2**128 - 1).map(lambda n: f"{n:032x}"),
    st.sampled_from(["0" * 31, "0" * 33, "A" * 32, "g" * 32, "0x" + "0" * 30]),
)
_label_keys = st.one_of(
    st.sampled_from(["pool", "nvidia.com/gpu.product", "a/b/c", "-x", "a" * 63, "a" * 64, "x y"]),
    st.builds(
        lambda prefix, name: f"{prefix}/{name}",
        st.text("az09.-", min_size=1, max_size=6),
        st.text("aZ0_.-", min_size=1, max_size=6),
    ),
)
_label_values = st.one_of(
    st.sampled_from(["", "h100", "a" * 63, "a b", "_x", "x_", "12:30", "H100-80GB"]),
    st.text("aZ0_.-", max_size=6),
)
_percent = st.integers(10, 99)
_thresholds = st.integers(0, 3) | st.integers(0, 10**9)

_hbm = _section({}, {"percentOfDevice": st.integers(1, 90), "size": sizes("16Gi", "1Mi", "16Ti")})
_dram = _section({}, {"ratioToHBM": st.integers(1, 64), "size": sizes("96Gi", "1Mi", "64Ti")})
_nvme = _section(
    {
        "size": sizes("2Ti", "1Mi", "4Pi"),
        "volumes": st.lists(_names, min_size=1, max_size=4, unique=True),
    },
    {"reservePercent": st.integers(0, 50)},
)
_prefix = _section(
    {"name": _names, "maxSize": sizes("2Gi", "4Ki", "16Ti", "8Gi")},
    {"pageKeys": st.lists(_keys, max_size=3, unique=True)},
)
_quota = _section(
    {"tenant": _names},
    {f"{tier}Percent": st.integers(0, 100) for tier in ("hbm", "dram", "nvme")},
)
_expression = _section(
    {"key": _label_keys, "operator": st.sampled_from(["In", "NotIn", "Exists", "DoesNotExist"])},
    {"values": st.lists(_label_values, max_size=3)},
)


def specs() -> st.SearchStrategy[Spec]:
    """Specs that obey the schema, and the rules or not."""
    return _section(
        {
            "valueDensity": _section(
                {"model": st.just("classic")},
                {
                    "thresholdMicrosecondsPerMiB": _section(
                        {}, dict.fromkeys(("hbm", "dram", "nvme"), _thresholds)
                    ),
                    "priorReusePercent": st.integers(1, 100),
                },
            )
        },
        {
            "nodeSelector": _section(
                {},
                {
                    "matchLabels": st.dictionaries(_label_keys, _label_values, max_size=3),
                    "matchExpressions": st.lists(_expression, max_size=3),
                },
            ),
            "priority": st.integers(0, 10**6),
            "tiers": _section({}, {"hbm": _hbm, "dram": _dram, "nvme": _nvme}),
            "page": _section(
                {},
                {
                    "tokens": st.integers(1, 512).map(lambda n: n * 16) | st.integers(16, 8192),
                    "transferSize": sizes("1Mi", "256Ki", "512Ki"),
                },
            ),
            "replacement": _section({}, {"coolDownSeconds": st.integers(0, 3600)}),
            "pressure": _section(
                {}, {"tightenPercent": _percent, "demotePercent": _percent.map(lambda n: n + 1)}
            ),
            "frozenPrefixes": st.lists(_prefix, max_size=3, unique_by=lambda p: str(p["name"])),
            "tenants": _section(
                {},
                {"quotas": st.lists(_quota, max_size=3, unique_by=lambda q: str(q["tenant"]))},
            ),
            "slo": _section({}, {"ttftP99Milliseconds": st.integers(1, 600_000)}),
            "durability": st.sampled_from(["none", "async", "sync"]),
            "rollout": _section({}, {"strategy": st.just("AllAtOnce"), "paused": st.booleans()}),
        },
    )


def policy(spec: Spec, name: str = "generated") -> dict[str, Any]:
    """A whole object around a spec."""
    return {
        "apiVersion": "kvtier.io/v1alpha1",
        "kind": "KVTierPolicy",
        "metadata": {"name": name},
        "spec": spec,
    }


@st.composite
def close_calls(draw: st.DrawFn) -> tuple[str, list[str]]:
    """(tiers.hbm.size, sizes of frozen prefixes) that add up to it exactly, or miss it by as little
    as can be written; now and then a size is beyond its bounds."""
    suffix, most = draw(
        st.sampled_from(
            [("Gi", 10), ("Ti", 16), ("Mi", 2**20), ("G", 100), ("Ki", 2**24), ("T", 9)]
        )
    )
    whole = draw(st.integers(1, most)) * 10**6
    count = draw(st.integers(1, 8))
    cuts = sorted(draw(st.lists(st.integers(0, whole), min_size=count, max_size=count)))
    parts = [b - a for a, b in zip([0, *cuts], [*cuts, whole], strict=True)]
    parts = [part for part in parts if part] or [whole]
    parts[0] += draw(st.sampled_from([0, 0, 1, -1, 10**5]))
    tier = whole + draw(st.sampled_from([0, 0, 0, 1, -1]))

    def written(millionths: int) -> str:
        text = f"{millionths // 10**6}.{millionths % 10**6:06d}".rstrip("0").rstrip(".")
        return text + suffix

    return written(tier), [written(max(0, part)) for part in parts]


def valid_specs() -> st.SearchStrategy[Spec]:
    """Specs that obey schema and rules: what breaks a rule is cut out, section by section."""
    return specs().map(_mended)


def _mended(spec: Spec) -> Spec:
    spec = dict(spec)
    for name in [name for name in spec if name != "valueDensity"]:
        alone = {"valueDensity": {"model": "classic"}, name: spec[name]}
        if validate(policy(alone)) and name != "durability":
            del spec[name]
    for name in ("frozenPrefixes", "durability", "tenants", "valueDensity"):
        if validate(policy(spec)):
            spec.pop(name, None)
            spec.setdefault("valueDensity", {"model": "classic"})
    return spec
