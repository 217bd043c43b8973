"""The policy of a replay's own agent: read, checked, and its tiers given in pages."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.replay.errors import ReplayError
from kvtier_agent.replay.policyfile import load_policy, parse_tiers, with_tiers
from kvtier_agent.storage.l2 import L2
from kvtier_agent.storage.volume import Volume
from kvtier_api.policy import KVTierPolicy
from kvtier_api.validate import parse

PAGE = 16384


def test_the_packaged_policy_is_valid() -> None:
    policy = parse(KVTierPolicy, load_policy(None))
    assert policy.spec.tiers.nvme is not None


def test_tiers_are_pages(tmp_path: Path) -> None:
    assert parse_tiers("l0=300, l2=5") == {"l0": 300, "l2": 5}
    changed = parse(
        KVTierPolicy, with_tiers(load_policy(None), {"l0": 300, "l1": 2000, "l2": 10_000}, PAGE)
    )
    tiers = changed.spec.tiers
    assert tiers.hbm.size is not None
    assert tiers.dram.size is not None
    assert tiers.nvme is not None
    assert (tiers.hbm.size.bytes, tiers.dram.size.bytes) == (300 * PAGE, 2000 * PAGE)
    volume = Volume("data0", tmp_path, "d", allow_root_filesystem=True)
    l2 = L2([volume], Geometry.of_page_bytes(PAGE, 16))
    assert 10_000 <= l2.limit(tiers.nvme.size.bytes, 0, "async") <= 10_010
    volume.close()
    assert tiers.nvme.volumes == ("data0",)


def test_tiers_not_named_keep_the_policys_size() -> None:
    before = load_policy(None)
    after = with_tiers(before, {"l1": 500}, PAGE)
    assert after["spec"]["tiers"]["hbm"] == before["spec"]["tiers"]["hbm"]
    assert after["spec"]["tiers"]["nvme"] == before["spec"]["tiers"]["nvme"]
    assert "nvme" in before["spec"]["tiers"], "the policy given is not changed"


def test_no_pages_of_l2_is_no_l2() -> None:
    assert "nvme" not in with_tiers(load_policy(None), {"l2": 0}, PAGE)["spec"]["tiers"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("l0", "l0=N,l1=N,l2=N"),
        ("l3=5", "l0=N,l1=N,l2=N"),
        ("l0=-5", "l0=N,l1=N,l2=N"),
        ("l0=5,l0=6", "twice"),
        ("l1=0", "passes through L1"),
    ],
)
def test_tiers_that_make_no_sense(text: str, says: str) -> None:
    with pytest.raises(ReplayError, match=says):
        parse_tiers(text)


def test_a_tier_too_small_for_the_api_says_what_to_write() -> None:
    with pytest.raises(ReplayError, match="l0=64 or more"):
        with_tiers(load_policy(None), {"l0": 3}, PAGE)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "not YAML"),
        ("", "holds 0 documents"),
        ("kind: KVTierPolicy\n", "apiVersion"),
        ("kind: Pod\napiVersion: v1\n", "apiVersion"),
    ],
)
def test_policies_that_are_none(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with pytest.raises(ReplayError, match=says) as caught:
        load_policy(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(ReplayError, match="No such file"):
        load_policy(tmp_path / "absent")
