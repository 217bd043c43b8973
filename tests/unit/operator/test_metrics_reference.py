"""The metrics' reference page names exactly the operator's metrics, with their labels."""

from __future__ import annotations

import re
from pathlib import Path

from kvtier_operator.main import Operator
from kvtier_operator.settings import OperatorSettings

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"
ROW = re.compile(r"^\| `(kvtier_operator_\w+)` \| ([^|]*)\|", re.MULTILINE)


def test_the_reference_page_and_the_metrics_agree() -> None:
    documented = {
        name: set(re.findall(r"`(\w+)`", labels))
        for name, labels in ROW.findall(PAGE.read_text("utf-8"))
    }
    operator = Operator(OperatorSettings(), api=None)
    metrics = operator.metrics
    operator.freshness.connected("nodes")
    metrics.wrote("kvtiernodes", "apply", "done")
    metrics.reconciles.labels("node", "some-rule", "done").inc()
    metrics.seconds.labels("node").observe(0.1)
    found: dict[str, set[str]] = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            name = re.sub(r"_(bucket|count|sum)$", "", sample.name)
            if not name.endswith("_created"):
                found.setdefault(name, set()).update(set(sample.labels) - {"le"})
    assert found == documented
