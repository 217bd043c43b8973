"""The JSON contract, and what counts as a finding."""

from __future__ import annotations

import json
from typing import Any

from kvtier_agent.replay.accounting import Totals
from kvtier_agent.replay.readings import readings
from kvtier_agent.replay.report import Quantiles, Report
from rich.console import Console


def report(**changes: Any) -> Report:
    totals = Totals(5, 3, 2, 10, 5000, 10_000, 50.0, 200.0)
    fields: dict[str, Any] = {
        "requests": 4,
        "blocks": 20,
        "tokens": 10_000,
        "whole": totals,
        "second_half": totals,
        "pages_written": {"l0": 10, "l1": 5, "l2": 2},
        "bytes_written": {"l0": 10, "l1": 5, "l2": 2},
        "evictions": {"l0": 5, "l1": 2, "l2": 0},
        "dropped": {"l0": 0, "l1": 0, "l2": 0},
        "latency": {"l2->l1": Quantiles(0.001, 0.002)},
        "wrong_pages": 0,
        "wrong_bytes": 0,
        "planted": {},
        "quarantined": 0,
        "failed_requests": 0,
        "refused": {},
        "seconds": 2.0,
    }
    return Report(**fields | changes)


def test_the_json_keys_others_rely_on() -> None:
    obj = json.loads(json.dumps(report().as_json()))
    assert obj["trace"] == {"requests": 4, "blocks": 20, "tokens": 10_000}
    assert obj["hits"] == {"l0": 5, "l1": 3, "l2": 2, "miss": 10}
    assert (obj["block_hit_rate"], obj["token_hit_rate"], obj["compute_saved"]) == (0.5, 0.5, 0.25)
    assert set(obj["second_half"]) == {"block_hit_rate", "token_hit_rate"}
    for name in ("pages_written", "bytes_written", "evictions"):
        assert set(obj[name]) == {"l0", "l1", "l2"}
    assert obj["latency_seconds"]["l2->l1"] == {"p50": 0.001, "p99": 0.002}
    assert obj["pages_verified"] == 10
    assert (obj["wrong_bytes"], obj["quarantined"], obj["failed_requests"]) == (0, 0, 0)
    assert obj["accesses_per_second"] == 10.0


def test_findings_are_what_was_not_planned() -> None:
    assert report().findings() == []
    assert "2 pages with wrong bytes" in report(wrong_pages=2).findings()[0]
    assert "1 pages quarantined" in report(quarantined=1).findings()[0]
    assert "3 requests got no answer" in report(failed_requests=3).findings()[0]


def test_a_self_test_must_find_exactly_what_was_planted() -> None:
    buffers = {"client_buffers": 7, "client_buffers_asked": 7}
    assert report(planted=buffers, wrong_pages=7).findings() == []
    assert report(planted=buffers, wrong_pages=6).findings()
    pages = {"stored_pages": 5, "stored_pages_asked": 5}
    assert report(planted=pages, quarantined=5).findings() == []
    assert report(planted=pages, quarantined=4).findings()
    assert report(planted=pages, quarantined=5, wrong_pages=1).findings()
    short = {"stored_pages": 3, "stored_pages_asked": 5}
    assert "only 3 of 5" in report(planted=short, quarantined=3).findings()[0]


def test_the_table_says_the_verdict() -> None:
    console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    console.print(report().as_table())
    console.print(report(wrong_pages=1, bad_line_count=1, bad_lines=("line 4: x",)).as_table())
    text = console.export_text()
    assert "no wrong byte was served" in text
    assert "finding: 1 pages with wrong bytes" in text
    assert "line 4: x" in text


def test_readings_are_differences() -> None:
    before = readings(
        {"counters": {"stored_l0": 5, "evicted_l2": 1, "demoted_l0": 2, "quarantined_pages": 1}}
    )
    after = readings(
        {
            "counters": {
                "stored_l0": 9, "evicted_l2": 4, "demoted_l0": 5, "quarantined_pages": 1,
                "stored_bytes_l2": 77, "evicted_l0": 1,
            },
            "latency": {
                "l2->l1": {"count": 2, "p50": 0.1, "p99": 0.2},
                "l1->l2": {"count": 0, "p50": None, "p99": None},
            },
        }
    )  # fmt: skip
    did = after - before
    assert did.pages_written == {"l0": 4, "l1": 0, "l2": 0}
    assert did.bytes_written["l2"] == 77
    assert did.evictions == {"l0": 4, "l1": 0, "l2": 3}
    assert did.dropped == {"l0": 1, "l1": 0, "l2": 3}
    assert did.quarantined == 0
    assert did.latency == {"l2->l1": Quantiles(0.1, 0.2)}
