"""Problems name the field as kubectl does and say what to write instead."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_api import KVTierPolicy, Problem, rules, validate
from kvtier_api.model import UNRULED
from kvtier_api.shape import prune, unknown_fields
from kvtier_api.validate import InvalidObject, broken_rules
from specgen import policy, specs, valid_specs

MINIMAL: dict[str, Any] = {"valueDensity": {"model": "classic"}}


def problems(**sections: Any) -> dict[str, str]:
    return {p.path: p.message for p in validate(policy({**MINIMAL, **sections}))}


def test_the_least_policy_is_valid() -> None:
    assert validate(policy(MINIMAL)) == []


def test_paths_lead_into_lists_and_maps() -> None:
    found = problems(
        nodeSelector={"matchLabels": {"gpu product": "x"}},
        tiers={"nvme": {"size": "2Ti", "volumes": ["data0", "/mnt"]}},
        frozenPrefixes=[{"name": "a", "maxSize": "1Gi", "pageKeys": ["xyz"]}],
    )
    assert found == {
        "spec.nodeSelector.matchLabels.gpu product": rules.LABEL_KEY.message,
        "spec.tiers.nvme.volumes[1]": rules.VOLUME_NAME.message,
        "spec.frozenPrefixes[0].pageKeys[0]": rules.PAGE_KEY.message,
    }


@pytest.mark.parametrize(
    ("tier", "frozen", "fits"),
    [
        ("1Gi", ["0.3Gi", "0.7Gi"], True),
        ("1Gi", ["0.1Gi", "0.2Gi", "0.7Gi"], True),
        ("1Gi", ["0.3Gi", "0.700001Gi"], False),
        ("16Ti", ["5.333333Ti", "5.333333Ti", "5.333334Ti"], True),
        ("16Ti", ["5.333333Ti", "5.333334Ti", "5.333334Ti"], False),
        ("1048576.000001", ["1048575.000001", "1"], True),  # and 1 is too small by itself
        ("1048576.000001", ["1048575.000001", "1.000001"], False),
        ("1Gi", [], True),
    ],
)
def test_sums_of_sizes_are_exact(tier: str, frozen: list[str], fits: bool) -> None:
    found = problems(
        tiers={"hbm": {"size": tier}},
        frozenPrefixes=[{"name": f"p{i}", "maxSize": size} for i, size in enumerate(frozen)],
    )
    assert (rules.FROZEN_FIT.message not in found.values()) == fits


def test_bounds_are_exact() -> None:
    """Rounded up it would be 1Mi, but it is less."""
    found = problems(tiers={"hbm": {"size": "1048575.5"}})
    assert found == {"spec.tiers.hbm.size": rules.HBM_SIZE.message}


def test_every_problem_is_listed_not_only_the_first() -> None:
    found = problems(
        page={"tokens": "many", "transferSize": "2Mi"},
        pressure={"tightenPercent": 99, "demotePercent": 95},
        slo={"ttftP99Milliseconds": 0},
        durability="sync",
        wear={},
    )
    assert set(found) == {
        "spec.wear",
        "spec.page.tokens",
        "spec.pressure.tightenPercent",
        "spec.slo.ttftP99Milliseconds",
    }


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("nodeselector", "nodeSelector"),
        ("node_selector", "nodeSelector"),
        ("value-density", "valueDensity"),
        ("tier", "tiers"),
        ("frozenPrefix", "frozenPrefixes"),
    ],
)
def test_an_unknown_field_is_answered_by_the_nearest_known_one(written: str, meant: str) -> None:
    assert problems(**{written: {}})[f"spec.{written}"] == f"unknown field, did you mean {meant}?"


def test_a_field_near_to_none_is_answered_by_all() -> None:
    assert problems(slo={"x": 1})["spec.slo.x"] == (
        "unknown field, known here: ttftP99Milliseconds"
    )


@pytest.mark.parametrize("value", ["20", True, 20.5, [20], {"a": 1}])
def test_numbers_are_whole_and_not_in_quotes(value: object) -> None:
    assert problems(priority=value) == {"spec.priority": "must be a whole number"}


def test_a_whole_number_may_be_written_as_a_float() -> None:
    assert problems(priority=20.0) == {}


def test_an_empty_section_takes_its_default_or_is_a_mistake() -> None:
    assert problems(tiers={"hbm": None}, slo=None) == {}
    assert set(problems(tiers={"nvme": None})) == {"spec.tiers.nvme"}
    assert set(problems(slo={"ttftP99Milliseconds": None})) == {"spec.slo.ttftP99Milliseconds"}


@pytest.mark.parametrize("obj", [None, 5, "text", [], {}, {"kind": []}, {"apiVersion": 1}])
def test_what_is_no_policy_at_all_is_said_so(obj: object) -> None:
    assert validate(obj)


@pytest.mark.parametrize(
    ("metadata", "path"),
    [
        (None, "metadata"),
        ({}, "metadata.name"),
        ({"name": "Upper"}, "metadata.name"),
        ({"name": "a..b"}, "metadata.name"),
        ({"name": 5}, "metadata.name"),
        ({"name": "a", "namespace": "default"}, "metadata.namespace"),
        ({"name": "a", "label": {}}, "metadata.label"),
        ({"name": "a" * 64}, "metadata.name"),
    ],
)
def test_metadata_is_looked_at_too(metadata: object, path: str) -> None:
    assert path in {p.path for p in validate({**policy(MINIMAL), "metadata": metadata})}


def test_unknown_fields_are_found_in_depth_and_computed_ones_are_known() -> None:
    obj = policy({**MINIMAL, "tiers": {"hbm": {"size": "1Gi", "a": 1}}, "b": 2})
    obj["status"] = {"shortRevision": "", "nodes": {"summary": "1/1"}, "c": 3}
    assert unknown_fields(KVTierPolicy, obj) == ["spec.tiers.hbm.a", "spec.b", "status.c"]


def test_reading_reports_every_problem() -> None:
    with pytest.raises(InvalidObject) as caught:
        KVTierPolicy.read(policy({**MINIMAL, "priority": -1, "durability": "sync"}))
    assert [p.path for p in caught.value.problems] == ["spec.priority"]
    with pytest.raises(InvalidObject) as caught:
        KVTierPolicy.read(policy({**MINIMAL, "durability": "sync"}))
    assert caught.value.problems == (Problem("spec.durability", rules.SYNC_NEEDS_NVME.message),)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(valid_specs(), st.data())
def test_no_value_anywhere_is_a_traceback(spec: dict[str, Any], data: st.DataObject) -> None:
    """One place of a valid policy, replaced by anything that JSON can say."""
    obj: Any = policy(spec)
    where: Any = obj
    while True:
        key = data.draw(st.sampled_from(sorted(where)) if isinstance(where, dict) else st.just(0))
        below = where[key]
        if not below or not isinstance(below, dict | list) or data.draw(st.booleans()):
            break
        where = below
    before = copy.deepcopy(obj)
    where[key] = data.draw(_json)
    found = validate(obj)
    assert all(isinstance(p.message, str) and p.message for p in found)
    where[key] = below
    assert obj == before, "validation changed what it was given"


def problems_of_reading(obj: object) -> tuple[Problem, ...]:
    try:
        KVTierPolicy.read(obj)
    except InvalidObject as error:
        return error.problems
    return ()


@given(specs())
def test_predicates_are_total_on_what_the_schema_admits(spec: dict[str, Any]) -> None:
    """Rules of objects never fail to answer, and reading agrees with validation."""
    obj = policy(spec)
    found = validate(obj)
    assert set(problems_of_reading(obj)) == set(found)


@given(valid_specs())
def test_generated_valid_specs_are_valid(spec: dict[str, Any]) -> None:
    model = KVTierPolicy.model_validate(
        prune(KVTierPolicy, policy(spec)), by_alias=True, by_name=False, context={UNRULED: True}
    )
    assert list(broken_rules(model)) == []
