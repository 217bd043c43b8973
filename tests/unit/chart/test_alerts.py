"""The alert rules, run by promtool over series, and their metrics against the agent's."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

SERIES = Path(__file__).with_name("alerts.yaml")


def rules_of(rendered: Any) -> dict[str, Any]:
    spec: dict[str, Any] = rendered.one("PrometheusRule")["spec"]
    return spec


def promtool_says(program: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(program), *arguments], capture_output=True, text=True, cwd=cwd, timeout=60, check=False
    )


@pytest.fixture
def rules(render: Callable[..., Any], tmp_path: Path) -> Callable[..., Path]:
    """rules(**overrides of the value prometheusRule) -> a rules file as Prometheus reads it."""

    def write(**overrides: Any) -> Path:
        rendered = render({"prometheusRule": {"enabled": True, **overrides}})
        path = tmp_path / "rules.yaml"
        path.write_text(yaml.safe_dump(rules_of(rendered)))
        return path

    return write


def test_alerts_fire_and_stay_silent_where_they_should(
    promtool: Path, rules: Callable[..., Path]
) -> None:
    path = rules()
    checked = promtool_says(promtool, "check", "rules", "--lint=all", path.name, cwd=path.parent)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "3 rules found" in checked.stdout
    shutil.copy(SERIES, path.parent / "alerts.yaml")
    tested = promtool_says(promtool, "test", "rules", "alerts.yaml", cwd=path.parent)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_thresholds_are_values(promtool: Path, rules: Callable[..., Path]) -> None:
    path = rules(
        evictionRate={"warningPagesPerMinute": 50},
        l0HitRate={"warningPercent": 80, "criticalPercent": 70, "minLookups": 20},
    )
    series = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": 'kv_evictions_total{node="n",layer="2"}', "values": "0+60x40"},
                    {"series": 'kv_cache_hit_total{node="n",layer="0"}', "values": "0+3x40"},
                    {"series": 'kv_cache_hit_total{node="n",layer="1"}', "values": "0+1x40"},
                ],
                "promql_expr_test": [
                    {
                        "expr": "count by (alertname, severity) (ALERTS{alertstate='firing'})",
                        "eval_time": "30m",
                        "exp_samples": [
                            {
                                "labels": '{alertname="KVTierEvictionRateHigh",severity="warning"}',
                                "value": 1,
                            },
                            {
                                "labels": '{alertname="KVTierL0HitRateLow",severity="warning"}',
                                "value": 1,
                            },
                        ],
                    }
                ],
            }
        ],
    }
    (path.parent / "alerts.yaml").write_text(yaml.safe_dump(series))
    tested = promtool_says(promtool, "test", "rules", "alerts.yaml", cwd=path.parent)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_every_metric_in_a_rule_is_one_of_the_agents(
    render: Callable[..., Any], root: Path
) -> None:
    used = {
        metric
        for group in rules_of(render({"prometheusRule": {"enabled": True}}))["groups"]
        for rule in group["rules"]
        for metric in re.findall(r"\bkv_[a-z0-9_]+", rule["expr"])
    }
    assert used == {"kv_evictions_total", "kv_cache_hit_total", "kv_tier_capacity_bytes"}
    source = (root / "agent/kvtier_agent/server/metrics.py").read_text()
    for metric in used:
        assert f'"{metric.removesuffix("_total")}"' in source, metric


def test_every_alert_has_a_severity_and_a_runbook(render: Callable[..., Any], root: Path) -> None:
    runbooks = (root / "docs/administrator/runbooks.md").read_text()
    anchors = {
        re.sub(r"[^a-z0-9 -]", "", title.lower()).strip().replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", runbooks, flags=re.MULTILINE)
    }
    url = "docs/administrator/runbooks.md"
    (group,) = rules_of(render({"prometheusRule": {"enabled": True}}))["groups"]
    for rule in group["rules"]:
        assert rule["labels"]["severity"] in ("warning", "critical")
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert page == url
        assert anchor in anchors, rule["alert"]
