"""The metrics' reference page names exactly the metrics there are, with their labels."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from kvtier_agent.cache.settings import TenantQuota
from kvtier_agent.server import protocol as p
from kvtier_agent.server.client import Client
from prometheus_client.parser import text_string_to_metric_families

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"
ROW = re.compile(r"^\| `(kv_\w+)` \| ([^|]*)\|", re.MULTILINE)


def test_the_reference_page_and_the_metrics_agree(
    make_agent: Callable[..., Any],
    connect: Callable[..., Client],
    pages_of: Callable[..., Any],
    get: Callable[..., Any],
    until: Callable[..., bool],
) -> None:
    documented = {
        name: set(re.findall(r"`(\w+)`", labels))
        for name, labels in ROW.findall(PAGE.read_text("utf-8"))
    }
    agent = make_agent(l0=1 << 20)
    quotas = (TenantQuota("search", 50, 50, 50),)  # without any there are no metrics of tenants
    behaviour = replace(agent.behaviour, quotas=quotas)
    agent.call(lambda: agent.core.reconfigure(time.monotonic(), behaviour, agent.budgets))
    client, pages = connect(agent.socket()), pages_of(1, 100)
    for start in range(0, 100, 10):
        client.put(pages.keys[start : start + 10], pages.bytes[start : start + 10])
    link = client._link
    assert link.connection is not None
    link.end_lease(link.connection, 1 << 40, np.array([1], "<u4"))
    link.connection.send(p.Abort(0, link.connection.welcome.boot + 1))  # refused, and counted
    port = agent.http.address[1]

    def found() -> dict[str, set[str]]:
        names: dict[str, set[str]] = {}
        for family in text_string_to_metric_families(get(port, "/metrics")[1]):
            for sample in family.samples:
                name = re.sub(r"_(bucket|count|sum)$", "", sample.name)
                names.setdefault(name, set()).update(set(sample.labels) - {"le"})
        return names

    assert until(lambda: set(found()) == set(documented)), set(found()) ^ set(documented)
    assert found() == documented
