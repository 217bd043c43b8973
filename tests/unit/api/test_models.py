"""Models: frozen, spelt as in YAML, and true to the reference policy."""

from typing import Any

import pytest
from hypothesis import given
from kvtier_api import InvalidObject, KVTierNode, KVTierPolicy, PolicySpec, RevisionSpec
from kvtier_api.model import camel
from kvtier_api.node import TierStatus
from kvtier_api.policy import NodeCounts, PolicyStatus, ValueDensity
from kvtier_api.selector import MatchExpression, NodeSelector
from pydantic import ValidationError
from specgen import policy, valid_specs


def spec(**sections: Any) -> RevisionSpec:
    return RevisionSpec(value_density=ValueDensity(model="classic"), **sections)


@pytest.mark.parametrize(
    ("python", "yaml"),
    [
        ("percent_of_device", "percentOfDevice"),
        ("ratio_to_hbm", "ratioToHBM"),
        ("threshold_microseconds_per_mib", "thresholdMicrosecondsPerMiB"),
        ("ttft_p99_milliseconds", "ttftP99Milliseconds"),
        ("node_uid", "nodeUID"),
        ("boot_id", "bootID"),
        ("hits_l0", "hitsL0"),
        ("nvme_bytes_written", "nvmeBytesWritten"),
    ],
)
def test_names_in_yaml(python: str, yaml: str) -> None:
    assert camel(python) == yaml


def test_defaults_are_those_of_the_reference() -> None:
    plain = spec()
    assert plain.tiers.hbm.percent_of_device == 20
    assert plain.tiers.dram.ratio_to_hbm == 6
    assert plain.tiers.nvme is None
    assert plain.page.tokens == 256
    assert plain.page.transfer_size.bytes == 2**20
    assert plain.value_density.prior_reuse_percent == 30
    assert plain.replacement.cool_down_seconds == 5
    assert (plain.pressure.tighten_percent, plain.pressure.demote_percent) == (90, 95)
    assert plain.slo.ttft_p99_milliseconds is None
    assert plain.durability == "async"


def test_the_value_model_has_no_default() -> None:
    with pytest.raises(ValidationError, match="model"):
        ValueDensity.model_validate({})


def test_models_are_frozen() -> None:
    plain = spec()
    with pytest.raises(ValidationError, match="frozen"):
        plain.page.tokens = 512  # type: ignore[misc]


def test_python_names_are_no_yaml_names() -> None:
    with pytest.raises(InvalidObject, match=r"spec.valueDensity: required"):
        KVTierPolicy.read(policy({"value_density": {"model": "classic"}}))


def test_rules_hold_on_construction() -> None:
    with pytest.raises(ValidationError, match="durability: sync needs an NVMe tier"):
        spec(durability="sync")


@given(valid_specs())
def test_what_is_read_and_written_again_is_the_same(drawn: dict[str, Any]) -> None:
    read = KVTierPolicy.read(policy(drawn))
    again = KVTierPolicy.read(read.to_dict())
    assert again == read
    assert again.to_dict() == read.to_dict()


@given(valid_specs())
def test_behaviour_is_the_spec_without_its_control_input(drawn: dict[str, Any]) -> None:
    whole = KVTierPolicy.read(policy(drawn)).spec
    part = whole.behaviour()
    assert type(part) is RevisionSpec
    expected = whole.to_dict()
    for name in ("nodeSelector", "priority", "rollout"):
        del expected[name]
    assert part.to_dict() == expected
    assert RevisionSpec.read(part.to_dict()) == part


def test_a_reader_ignores_fields_of_later_releases() -> None:
    later = policy({"valueDensity": {"model": "classic"}, "codecs": {"nvme": "int8"}})
    later["metadata"] |= {"uid": "u", "generation": 3, "managedFields": [{"manager": "kubectl"}]}
    read = KVTierPolicy.read(later)
    assert (read.metadata.uid, read.metadata.generation) == ("u", 3)
    assert isinstance(read.spec, PolicySpec)


def test_an_object_without_status_has_not_been_observed() -> None:
    assert KVTierPolicy.read(policy({"valueDensity": {"model": "classic"}})).status == (
        PolicyStatus(observed_generation=-1)
    )
    node = KVTierNode.read({"kind": "KVTierNode", "metadata": {"name": "n"}})
    assert node.status.observed_generation == -1
    assert node.spec.stable is None


def test_figures_for_tables_follow_from_the_others() -> None:
    assert NodeCounts(selected=3, ready=2).to_dict()["summary"] == "2/3"
    assert PolicyStatus(active_revision="ab" * 32).to_dict()["shortRevision"] == "ababababab"
    tier = TierStatus(name="hbm", capacity_bytes=1000, used_bytes=399)
    assert tier.to_dict()["usedPercent"] == 39
    assert TierStatus(name="nvme", capacity_bytes=0).used_percent == 0
    assert TierStatus.read(tier.to_dict()) == tier


LABELS = {"pool": "h100", "zone": "a", "empty": ""}


@pytest.mark.parametrize(
    ("key", "operator", "values", "holds"),
    [
        ("pool", "In", ("h100", "h200"), True),
        ("pool", "In", ("h200",), False),
        ("absent", "In", ("h100",), False),
        ("pool", "NotIn", ("h100",), False),
        ("absent", "NotIn", ("h100",), True),
        ("empty", "Exists", (), True),
        ("absent", "Exists", (), False),
        ("absent", "DoesNotExist", (), True),
        ("pool", "DoesNotExist", (), False),
    ],
)
def test_expressions_select_as_kubernetes_does(
    key: str, operator: Any, values: tuple[str, ...], holds: bool
) -> None:
    selector = NodeSelector(
        match_expressions=(MatchExpression(key=key, operator=operator, values=values),)
    )
    assert selector.matches(LABELS) is holds


def test_a_selector_needs_all_of_its_conditions() -> None:
    assert NodeSelector().matches(LABELS)
    assert NodeSelector().matches({})
    both = NodeSelector(match_labels={"pool": "h100", "zone": "a"})
    assert both.matches(LABELS)
    assert not both.matches({"pool": "h100"})
    exists = MatchExpression(key="gpu", operator="Exists")
    assert not NodeSelector(match_labels={"pool": "h100"}, match_expressions=(exists,)).matches(
        LABELS
    )
