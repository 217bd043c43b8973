"""The real API server refuses and accepts what validation does, with the same sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from controlplane.api import ApiError
from controlplane.testing import Kube
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvtier_api import KVTierPolicy, manifest, revision_hash, rules, validate
from specgen import close_calls, policy, specs

ROOT = Path(__file__).parents[3]
BAD = sorted((ROOT / "tests" / "contract" / "bad_policies").glob("*.yaml"))
GOOD = sorted((ROOT / "examples").rglob("*polic*/*.yaml"))
RELATIONS = {rule.message for rule in vars(rules).values() if isinstance(rule, rules.Rule)}
VALUES = {rule.message for rule in vars(rules).values() if isinstance(rule, rules.ValueRule)}
SENTENCES = RELATIONS | VALUES


def offer(kube: Kube, obj: dict[str, Any], how: str = "apply") -> dict[str, Any]:
    """What the API server would store; ApiError where it refuses. Nothing is written."""
    path = f"/apis/{obj['apiVersion']}/kvtierpolicies"
    options = "?dryRun=All&fieldManager=test&fieldValidation=Strict"
    if how == "create":
        return kube.api.request("POST", path + options, obj)
    return kube.api.request(
        "PATCH",
        f"{path}/{obj['metadata']['name']}{options}&force=true",
        obj,
        content_type="application/apply-patch+yaml",
    )


def refusal(kube: Kube, obj: dict[str, Any], how: str = "apply") -> str | None:
    """What the API server says against an object, or None."""
    try:
        offer(kube, obj, how)
    except ApiError as error:
        return error.message
    return None


@pytest.mark.parametrize("how", ["create", "apply"])
def test_bad_policies_are_refused_with_the_same_sentence(kube: Kube, how: str) -> None:
    """One test over all files: what a single one costs is the clean slate before it."""
    assert len(BAD) >= 45
    wrong = {}
    for path in BAD:
        by, sentence = (line.partition(": ")[2] for line in path.read_text().splitlines()[1:3])
        (document,) = manifest.read(path)
        said = refusal(kube, document.obj, how)
        if said is None or (by == "rule" and sentence not in said):
            wrong[path.name] = said
        assert [problem.message for problem in validate(document.obj)] == [sentence], path.name
    assert wrong == {}


def test_kubectl_shows_the_sentence(kube: Kube) -> None:
    path = next(path for path in BAD if path.stem == "pressure-reversed")
    done = kube.kubectl("apply", "-f", str(path), check=False)
    assert done.returncode == 1
    assert f"spec.pressure.tightenPercent: Invalid value: {rules.PRESSURE_ORDER.message}" in (
        done.stderr
    )


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_examples_are_accepted_and_mean_the_same_there(kube: Kube, path: Path) -> None:
    for document in manifest.read(path):
        stored = KVTierPolicy.read(offer(kube, document.obj))
        assert revision_hash(stored.spec) == revision_hash(KVTierPolicy.read(document.obj).spec)


def test_too_many_page_keys_in_all(kube: Kube) -> None:
    prefixes = [
        {
            "name": f"p{i}",
            "maxSize": "1Gi",
            "pageKeys": [f"{n:032x}" for n in range(i << 10, (i + 1) << 10)],
        }
        for i in range(5)
    ]
    spec: dict[str, Any] = {"valueDensity": {"model": "classic"}}
    assert validate(policy({**spec, "frozenPrefixes": prefixes[:4]})) == []
    offer(kube, policy({**spec, "frozenPrefixes": prefixes[:4]}))
    obj = policy({**spec, "frozenPrefixes": prefixes})
    assert [p.message for p in validate(obj)] == [rules.FROZEN_KEYS.message]
    with pytest.raises(ApiError, match="at most 4096 page keys"):
        offer(kube, obj)


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(spec=specs())
def test_rules_agree_on_generated_specs(kube: Kube, spec: dict[str, Any]) -> None:
    obj = policy(spec)
    here = {problem.message for problem in validate(obj)}
    said = refusal(kube, obj)
    if said is not None:
        there = {sentence for sentence in SENTENCES if sentence in said}
        assert here, said
        if here <= VALUES | RELATIONS:
            assert here <= there, said
        if here <= RELATIONS:
            # Where a value is wrong by itself the API server goes on to compare it with others,
            # so that it may say more; otherwise both say exactly the same.
            assert here == there, said
        return
    assert here == set()
    assert revision_hash(KVTierPolicy.read(offer(kube, obj)).spec) == revision_hash(
        KVTierPolicy.read(obj).spec
    )


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(tiers=close_calls())
def test_sums_of_sizes_agree_to_the_last_fraction_of_a_byte(
    kube: Kube, tiers: tuple[str, list[str]]
) -> None:
    hbm, frozen = tiers
    prefixes = [{"name": f"p{i}", "maxSize": size} for i, size in enumerate(frozen)]
    spec = {
        "valueDensity": {"model": "classic"},
        "tiers": {"hbm": {"size": hbm}},
        "frozenPrefixes": prefixes,
    }
    said = refusal(kube, policy(spec)) or ""
    here = {problem.message for problem in validate(policy(spec))}
    assert here == {sentence for sentence in SENTENCES if sentence in said}, said
    assert bool(here) == bool(said), said


@pytest.mark.parametrize("size", ["1048575.5", "1048575.999999", "1048576", "0.999999Mi"])
def test_bounds_agree_to_the_last_fraction_of_a_byte(kube: Kube, size: str) -> None:
    spec = {"valueDensity": {"model": "classic"}, "tiers": {"hbm": {"size": size}}}
    here = [problem.message for problem in validate(policy(spec))]
    assert here == ([] if size == "1048576" else [rules.HBM_SIZE.message])
    assert bool(refusal(kube, policy(spec))) == bool(here)


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    value=st.one_of(st.none(), st.booleans(), st.integers(-2, 200), st.floats(0, 3), st.text("a1")),
    place=st.sampled_from(
        [
            ("priority",),
            ("page", "tokens"),
            ("rollout", "paused"),
            ("slo", "ttftP99Milliseconds"),
            ("tiers", "hbm"),
            ("tiers", "nvme"),
            ("frozenPrefixes",),
            ("nodeSelector", "matchLabels"),
            ("durability",),
        ]
    ),
)
def test_types_agree(kube: Kube, value: Any, place: tuple[str, ...]) -> None:
    spec: dict[str, Any] = {"valueDensity": {"model": "classic"}}
    where = spec
    for name in place[:-1]:
        where = where.setdefault(name, {})
    where[place[-1]] = value
    said = refusal(kube, policy(spec))
    assert (said is None) == (validate(policy(spec)) == []), said
