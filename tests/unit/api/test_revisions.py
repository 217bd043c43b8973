"""The revision hash: equal for equal behaviour, whatever the spelling."""

import json
import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from kvtier_api import KVTierPolicy, revision_hash, revision_name
from kvtier_api.policy import RevisionSpec
from kvtier_api.quantity import Quantity
from kvtier_api.revision import canonical
from specgen import policy, valid_specs

CONTROL = ("nodeSelector", "priority", "rollout")


def hash_of(spec: dict[str, Any]) -> str:
    return revision_hash(KVTierPolicy.read(policy(spec)).spec)


def shuffled(value: Any, order: random.Random) -> Any:
    if isinstance(value, dict):
        items = [(key, shuffled(item, order)) for key, item in value.items()]
        order.shuffle(items)
        return dict(items)
    if isinstance(value, list):
        return [shuffled(item, order) for item in value]
    return value


@given(valid_specs())
def test_writing_defaults_out_changes_nothing(spec: dict[str, Any]) -> None:
    full = KVTierPolicy.read(policy(spec)).to_dict()["spec"]
    assert hash_of(full) == hash_of(spec)


@given(valid_specs(), st.randoms(use_true_random=False))
def test_the_order_of_keys_changes_nothing(spec: dict[str, Any], order: random.Random) -> None:
    assert hash_of(shuffled(spec, order)) == hash_of(spec)


@given(valid_specs(), valid_specs())
def test_control_input_is_not_part_of_it(one: dict[str, Any], other: dict[str, Any]) -> None:
    mixed = {key: value for key, value in one.items() if key not in CONTROL}
    mixed |= {key: other[key] for key in CONTROL if key in other}
    assert hash_of(mixed) == hash_of(one)


@given(valid_specs(), valid_specs())
def test_it_is_equal_exactly_where_behaviour_is(one: dict[str, Any], other: dict[str, Any]) -> None:
    a, b = (KVTierPolicy.read(policy(spec)).spec for spec in (one, other))
    assert (revision_hash(a) == revision_hash(b)) == (canonical(a) == canonical(b))


@given(valid_specs())
def test_what_is_hashed_leads_back_to_the_same_revision(spec: dict[str, Any]) -> None:
    """Nothing that matters is lost by removing defaults."""
    whole = KVTierPolicy.read(policy(spec)).spec
    assert revision_hash(RevisionSpec.read(canonical(whole))) == revision_hash(whole)


def test_lists_without_order_have_none() -> None:
    base: dict[str, Any] = {"valueDensity": {"model": "classic"}}
    frozen: list[dict[str, Any]] = [
        {"name": "a", "maxSize": "1Gi", "pageKeys": ["0" * 32, "1" * 32]},
        {"name": "b", "maxSize": "1Gi"},
    ]
    turned = [frozen[1], {**frozen[0], "pageKeys": ["1" * 32, "0" * 32]}]
    assert hash_of({**base, "frozenPrefixes": frozen}) == hash_of(
        {**base, "frozenPrefixes": turned}
    )
    volumes = [{"nvme": {"size": "2Ti", "volumes": v}} for v in (["a", "b"], ["b", "a"])]
    assert hash_of({**base, "tiers": volumes[0]}) == hash_of({**base, "tiers": volumes[1]})


def test_one_size_in_two_spellings_is_one_revision() -> None:
    base: dict[str, Any] = {"valueDensity": {"model": "classic"}}
    sizes = ["1.5Gi", "1536Mi", 1536 * 2**20, "1610612736"]
    found = {hash_of({**base, "tiers": {"hbm": {"size": size}}}) for size in sizes}
    assert len(found) == 1
    assert hash_of({**base, "page": {"transferSize": "1024Ki"}}) == hash_of(base)


def test_what_changes_behaviour_changes_it() -> None:
    base: dict[str, Any] = {"valueDensity": {"model": "classic"}}
    nvme = {"nvme": {"size": "2Ti", "volumes": ["a"]}}
    variants: list[dict[str, Any]] = [
        {},
        {"tiers": {"hbm": {"percentOfDevice": 21}}},
        {"tiers": {"hbm": {"size": "16Gi"}}},
        {"tiers": {"dram": {"ratioToHBM": 7}}},
        {"tiers": nvme},
        {"tiers": {"nvme": {**nvme["nvme"], "reservePercent": 11}}},
        {"page": {"tokens": 512}},
        {"page": {"transferSize": "512Ki"}},
        {"valueDensity": {"model": "classic", "priorReusePercent": 31}},
        {"valueDensity": {"model": "classic", "thresholdMicrosecondsPerMiB": {"hbm": 1}}},
        {"replacement": {"coolDownSeconds": 6}},
        {"pressure": {"tightenPercent": 89}},
        {"pressure": {"demotePercent": 96}},
        {"frozenPrefixes": [{"name": "a", "maxSize": "1Gi"}]},
        {"tenants": {"quotas": [{"tenant": "a", "dramPercent": 10}]}},
        {"tenants": {"quotas": [{"tenant": "a", "dramPercent": 0}]}},
        {"tenants": {"quotas": [{"tenant": "a", "hbmPercent": 10}]}},
        {"slo": {"ttftP99Milliseconds": 800}},
        {"durability": "none"},
    ]
    hashes = [hash_of({**base, **variant}) for variant in variants]
    assert len(set(hashes)) == len(variants)


def test_only_what_differs_from_a_default_is_hashed() -> None:
    spec = KVTierPolicy.read(
        policy(
            {
                "valueDensity": {"model": "classic", "priorReusePercent": 30},
                "tiers": {"hbm": {"size": "1Gi"}, "dram": {"ratioToHBM": 6}},
                "slo": {},
                "priority": 7,
            }
        )
    ).spec
    assert json.loads(json.dumps(canonical(spec))) == {
        "tiers": {"hbm": {"size": Quantity("1Gi").bytes}},
        "valueDensity": {"model": "classic"},
    }


def test_a_revision_is_named_after_its_policy() -> None:
    assert revision_name("llama", "0123456789abcdef" * 4) == "llama-0123456789"
