"""Keys of `kv_connector_extra_config`: bounds, typos, and that the guide says all of them."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
from kvtier_agent.connectors.vllm.settings import (
    ConnectorSettings,
    SettingsError,
    check_failure_policy,
    read_settings,
)

GUIDE = Path(__file__).parents[3] / "docs" / "user" / "engines.md"


def test_nothing_said_is_the_default() -> None:
    assert read_settings({}) == ConnectorSettings()
    assert read_settings({"kvtier.page_tokens": None}) == ConnectorSettings()


def test_what_is_said_counts() -> None:
    settings = read_settings({"kvtier.tenant": "search", "kvtier.page_tokens": "256", "lmcache": 1})
    assert (settings.tenant, settings.page_tokens) == ("search", 256)


def test_a_typo_is_answered_with_the_nearest_key() -> None:
    with pytest.raises(SettingsError, match=r"kvtier\.load_timeout_ms.*kvtier\.load_timeout_mil"):
        read_settings({"kvtier.load_timeout_ms": 5})


@pytest.mark.parametrize("knob", fields(ConnectorSettings), ids=lambda knob: knob.name)
def test_what_is_out_of_bounds_is_refused_with_the_bounds(knob) -> None:
    least, most = knob.metadata["least"], knob.metadata["most"]
    if knob.metadata["kind"] == "text":
        wrong = ["x" * (most + 1), 7]
    else:
        wrong = [least - 1, most + 1, 1.5, True, "many"]
    for value in wrong:
        with pytest.raises(SettingsError, match=rf"kvtier\.{knob.name} .* {least} to {most}"):
            read_settings({f"kvtier.{knob.name}": value})


@pytest.mark.parametrize("knob", fields(ConnectorSettings), ids=lambda knob: knob.name)
def test_the_guide_has_every_key_with_its_default(knob) -> None:
    row = re.search(rf"^\| `kvtier\.{knob.name}` \|.*\| ([^|]*) \|$", GUIDE.read_text(), re.M)
    assert row is not None
    if knob.default:
        assert str(knob.default) in row[1].replace(",", "")


def test_the_failure_policy_has_to_be_said() -> None:
    check_failure_policy(SimpleNamespace(kv_load_failure_policy="recompute"))
    check_failure_policy(SimpleNamespace())  # a vLLM that does not know it
    with pytest.raises(SettingsError, match='Write "kv_load_failure_policy": "recompute"'):
        check_failure_policy(SimpleNamespace(kv_load_failure_policy="fail"))
