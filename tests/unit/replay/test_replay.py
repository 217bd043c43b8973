"""A trace through a real agent in a process of its own: every tier serves, every byte is right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TIERS = "l0=300,l1=1500,l2=8000"
PAGE_BYTES = 4096


@pytest.fixture(scope="module")
def whole_run(replay: Callable[..., Any], sessions_trace: Path) -> dict[str, Any]:
    """One run that several tests look at."""
    done = replay(sessions_trace, "--tier", TIERS, "--page-bytes", PAGE_BYTES, "--json", "-")
    assert done.status == 0, done.err
    found: dict[str, Any] = done.json
    return found


def test_hits_come_from_all_three_tiers(whole_run: dict[str, Any]) -> None:
    hits, blocks = whole_run["hits"], whole_run["trace"]["blocks"]
    assert sum(hits.values()) == blocks
    assert min(hits["l0"], hits["l1"], hits["l2"]) >= blocks / 100, hits


def test_every_hit_was_verified_and_nothing_was_wrong(whole_run: dict[str, Any]) -> None:
    hits = whole_run["hits"]
    assert whole_run["pages_verified"] == hits["l0"] + hits["l1"] + hits["l2"]
    assert whole_run["wrong_bytes"] == 0
    assert whole_run["quarantined"] == 0
    assert whole_run["failed_requests"] == 0


def test_figures_agree_with_each_other(whole_run: dict[str, Any]) -> None:
    hits, blocks = whole_run["hits"], whole_run["trace"]["blocks"]
    assert whole_run["block_hit_rate"] == pytest.approx(1 - hits["miss"] / blocks)
    assert 0 < whole_run["token_hit_rate"] < 1
    assert 0 < whole_run["compute_saved"] < 1
    assert whole_run["pages_written"]["l0"] > 0
    assert whole_run["bytes_written"]["l2"] == whole_run["pages_written"]["l2"] * PAGE_BYTES
    assert whole_run["evictions"]["l0"] > 0
    for pair in ("l0->l1", "l1->l2", "l2->l1"):
        assert (
            0
            < whole_run["latency_seconds"][pair]["p50"]
            <= whole_run["latency_seconds"][pair]["p99"]
        )


def test_nothing_is_left_behind(whole_run: dict[str, Any]) -> None:
    seed = whole_run["settings"]["seed"]
    for folder in (Path("/dev/shm"), Path("/tmp")):
        assert not list(folder.glob(f"kvtier-replay-*-{seed:x}*"))


def test_planted_wrong_buffers_are_found_exactly(
    replay: Callable[..., Any], sessions_trace: Path
) -> None:
    done = replay(
        sessions_trace, "--tier", TIERS, "--page-bytes", PAGE_BYTES, "--limit", 200,
        "--self-test-corrupt", 37, "--json", "-",
    )  # fmt: skip
    assert done.status == 0, done.err
    assert (done.json["wrong_pages"], done.json["wrong_bytes"]) == (37, 37)
    assert done.json["quarantined"] == 0
    assert done.json["pages_verified"] == sum(done.json["hits"][t] for t in ("l0", "l1", "l2"))


def test_planted_bad_pages_are_quarantined_and_never_served(
    replay: Callable[..., Any], sessions_trace: Path
) -> None:
    done = replay(
        sessions_trace, "--tier", TIERS, "--page-bytes", PAGE_BYTES, "--limit", 300,
        "--corrupt-tier", 16, "--json", "-",
    )  # fmt: skip
    assert done.status == 0, done.err
    assert (done.json["wrong_bytes"], done.json["quarantined"]) == (0, 16)
    assert done.json["planted"]["stored_pages"] == 16


def test_a_self_test_that_cannot_plant_its_faults_fails(
    replay: Callable[..., Any], sessions_trace: Path
) -> None:
    done = replay(
        sessions_trace, "--tier", TIERS, "--page-bytes", PAGE_BYTES, "--limit", 1,
        "--self-test-corrupt", 5, "--json", "-",
    )  # fmt: skip
    assert done.status == 1
    assert "only 0 of 5" in done.err


def test_json_on_standard_output_is_all_there_is(
    replay: Callable[..., Any], sessions_trace: Path, tmp_path: Path
) -> None:
    arguments = (sessions_trace, "--page-bytes", PAGE_BYTES, "--limit", 5)
    printed = replay(*arguments, "--json", "-")
    assert json.loads(printed.out)["trace"]["requests"] == 5
    assert printed.out.strip().startswith("{")
    assert printed.out.strip().endswith("}")
    assert "verified" in printed.err, "the table is for people, on standard error"
    written = replay(*arguments, "--json", tmp_path / "out.json")
    assert written.out == ""
    assert json.loads((tmp_path / "out.json").read_text())["trace"]["requests"] == 5


def test_copies_have_nothing_in_common(replay: Callable[..., Any], sessions_trace: Path) -> None:
    arguments = ("--page-bytes", PAGE_BYTES, "--limit", 40, "--json", "-")
    tiers = ("--tier", "l0=4000,l1=4000,l2=0")
    once = replay(sessions_trace, *tiers, *arguments).json
    twice = replay(sessions_trace, *tiers, *arguments, "--copies", 2).json
    assert twice["trace"]["blocks"] == 2 * once["trace"]["blocks"]
    assert twice["hits"]["miss"] == 2 * once["hits"]["miss"]


def test_without_partial_pages_only_full_ones_count(
    replay: Callable[..., Any], sessions_trace: Path
) -> None:
    arguments = ("--page-bytes", PAGE_BYTES, "--limit", 40, "--json", "-")
    all_of_them = replay(sessions_trace, *arguments).json["trace"]
    full_only = replay(sessions_trace, "--no-partial", *arguments).json["trace"]
    assert full_only["tokens"] == all_of_them["tokens"]
    assert 0 < all_of_them["blocks"] - full_only["blocks"] <= 40


def test_speed_paces_the_run(replay: Callable[..., Any], tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    rows = [
        {"timestamp": n * 1000, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}
        for n in range(4)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = replay(trace, "--speed", 3, "--page-bytes", PAGE_BYTES, "--json", "-")
    assert done.status == 0, done.err
    assert done.json["seconds"] >= 1.0, "three trace seconds at three a second"
    assert done.json["hits"] == {"l0": 6, "l1": 0, "l2": 0, "miss": 2}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["absent.jsonl"], "no such trace"),
        (["TRACE", "--policy", "absent.yaml"], "absent.yaml"),
        (["TRACE", "--tier", "l0=3"], "write l0="),
        (["TRACE", "--tier", "l7=3"], "l0=N,l1=N,l2=N"),
        (["TRACE", "--page-bytes", "5000"], "multiple of 4096"),
        (["TRACE", "--speed", "fast"], "write max"),
        (["TRACE", "--volume", "data0"], "NAME=DIR"),
        (["TRACE", "--volume", "data0=/nowhere/at/all"], "make it first"),
        (["TRACE", "--socket", "absent.sock"], "absent.sock"),
        (["TRACE", "--socket", "absent.sock", "--tier", "l0=64"], "leave out"),
        (["TRACE", "--block-tokens", "16"], "--block-tokens"),
    ],
)
def test_mistakes_are_one_line_that_says_what_to_do(
    replay: Callable[..., Any], sessions_trace: Path, arguments: list[str], says: str
) -> None:
    done = replay(*[str(sessions_trace) if a == "TRACE" else a for a in arguments])
    assert done.status == 1, done.err
    assert says in done.err
    assert done.out == ""
    assert "Traceback" not in done.err
    problems = [line for line in done.err.splitlines() if line.startswith("error:")]
    assert len(problems) == 1


def test_bad_lines_are_counted_and_named(replay: Callable[..., Any], tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    good = '{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n'
    trace.write_text(good + "rubbish\n" + good)
    done = replay(trace, "--page-bytes", PAGE_BYTES, "--json", "-")
    assert done.status == 0, done.err
    assert done.json["bad_lines"]["count"] == 1
    assert done.json["bad_lines"]["first"][0].startswith("line 2:")
    assert "line 2" in done.err
