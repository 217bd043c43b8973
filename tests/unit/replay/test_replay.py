"""A trace through a real agent in a process of its own: every tier serves, every byte is right."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvtier_cli.main import app
from typer.testing import CliRunner

PAGE_BYTES = 4096


@pytest.fixture(scope="module")
def whole_run(
    replay: Callable[..., Any], sessions_trace: Path, tiers: dict[str, int]
) -> dict[str, Any]:
    """One run that several tests look at, with an agent of its own."""
    sizes = ",".join(f"{tier}={pages}" for tier, pages in tiers.items())
    done = replay(sessions_trace, "--tier", sizes, "--page-bytes", PAGE_BYTES, "--json", "-")
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
    play: Callable[..., Any], sessions_trace: Path, shared_agent: Any
) -> None:
    done = play(
        sessions_trace, *shared_agent.arguments, "--limit", 200,
        "--self-test-corrupt", 37, "--json", "-",
    )  # fmt: skip
    assert done.status == 0, done.err
    assert (done.json["wrong_pages"], done.json["wrong_bytes"]) == (37, 37)
    assert done.json["quarantined"] == 0
    assert done.json["pages_verified"] == sum(done.json["hits"][t] for t in ("l0", "l1", "l2"))


def test_planted_bad_pages_are_quarantined_and_never_served(
    play: Callable[..., Any], sessions_trace: Path, shared_agent: Any
) -> None:
    done = play(
        sessions_trace, *shared_agent.arguments, "--volume", f"data0={shared_agent.volume}",
        "--corrupt-tier", 16, "--json", "-",
    )  # fmt: skip
    assert done.status == 0, done.err
    assert (done.json["wrong_bytes"], done.json["quarantined"]) == (0, 16)
    planted = done.json["planted"]
    assert planted["stored_pages"] == planted["stored_pages_asked"] == 16
    assert planted["stored_pages_l1"] + planted["stored_pages_l2"] == 16
    assert planted["stored_pages_l2"] == 8


def test_a_self_test_that_cannot_plant_its_faults_fails(
    play: Callable[..., Any], sessions_trace: Path, shared_agent: Any
) -> None:
    done = play(
        sessions_trace, *shared_agent.arguments, "--limit", 1,
        "--self-test-corrupt", 5, "--json", "-",
    )  # fmt: skip
    assert done.status == 1
    assert "only 0 of 5" in done.err


def test_json_on_standard_output_is_all_there_is(
    replay: Callable[..., Any], sessions_trace: Path, shared_agent: Any, tmp_path: Path
) -> None:
    arguments = (sessions_trace, *shared_agent.arguments, "--limit", 5)
    printed = replay(*arguments, "--json", "-")
    assert json.loads(printed.out)["trace"]["requests"] == 5
    assert printed.out.strip().startswith("{")
    assert printed.out.strip().endswith("}")
    assert "verified" in printed.err, "the table is for people, on standard error"
    written = replay(*arguments, "--json", tmp_path / "out.json")
    assert written.out == ""
    assert json.loads((tmp_path / "out.json").read_text())["trace"]["requests"] == 5


def test_copies_have_nothing_in_common(
    play: Callable[..., Any], sessions_trace: Path, shared_agent: Any
) -> None:
    arguments = (*shared_agent.arguments, "--no-partial", "--limit", 40, "--json", "-")
    once = play(sessions_trace, *arguments).json
    twice = play(sessions_trace, *arguments, "--copies", 2).json
    assert once["hits"]["miss"] > 0
    assert twice["trace"]["blocks"] == 2 * once["trace"]["blocks"]
    assert twice["hits"]["miss"] == 2 * once["hits"]["miss"]


def test_a_seed_finds_the_pages_of_an_earlier_run(
    play: Callable[..., Any], sessions_trace: Path, shared_agent: Any
) -> None:
    arguments = (*shared_agent.arguments, "--no-partial", "--limit", 20, "--seed", 11)
    first = play(sessions_trace, *arguments, "--json", "-").json
    again = play(sessions_trace, *arguments, "--json", "-").json
    assert first["hits"]["miss"] > 0
    assert again["hits"]["miss"] == 0


def test_without_partial_pages_only_full_ones_count(
    play: Callable[..., Any], sessions_trace: Path, shared_agent: Any
) -> None:
    arguments = (*shared_agent.arguments, "--limit", 40, "--json", "-")
    all_of_them = play(sessions_trace, *arguments).json["trace"]
    full_only = play(sessions_trace, "--no-partial", *arguments).json["trace"]
    assert full_only["tokens"] == all_of_them["tokens"]
    assert 0 < all_of_them["blocks"] - full_only["blocks"] <= 40


def test_speed_paces_the_run(play: Callable[..., Any], shared_agent: Any, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    rows = [
        {"timestamp": n * 1000, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}
        for n in range(4)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = play(trace, *shared_agent.arguments, "--speed", 3, "--json", "-")
    assert done.status == 0, done.err
    assert done.json["seconds"] >= 1.0, "three trace seconds at three a second"
    assert done.json["hits"]["miss"] == 2
    assert done.json["pages_verified"] == 6


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["absent.jsonl"], "no such trace"),
        (["TRACE", "--policy", "absent.yaml"], "absent.yaml"),
        (["TRACE", "--tier", "l0=3"], "write l0="),
        (["TRACE", "--tier", "l7=3"], "l0=N,l1=N,l2=N"),
        (["TRACE", "--page-bytes", "5000"], "multiple of 4096"),
        (["TRACE", "--speed", "fast"], "write max"),
        (["TRACE", "--speed", "1e-300"], "from 1e-06 to 1e+09"),
        (["TRACE", "--policy", "pipe"], "is no regular file"),
        (["TRACE", "--json", "no/such/out.json"], "there is no folder no/such"),
        (["TRACE", "--json", "."], "is a folder"),
        (["TRACE", "--volume", "data0"], "NAME=DIR"),
        (["TRACE", "--volume", "data0=/nowhere/at/all"], "make it first"),
        (["TRACE", "--socket", "absent.sock"], "absent.sock"),
        (["TRACE", "--socket", "absent.sock", "--tier", "l0=64"], "leave out"),
        (["TRACE", "--block-tokens", "16"], "--block-tokens"),
    ],
)
def test_mistakes_are_one_line_that_says_what_to_do(
    sessions_trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    arguments: list[str], says: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    os.mkfifo("pipe")
    words = [str(sessions_trace) if word == "TRACE" else word for word in arguments]
    done = CliRunner().invoke(app, ["replay", *words])
    assert done.exit_code == 1, done.stderr
    assert says in done.stderr
    assert done.stdout == ""
    problems = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(problems) == 1


def test_a_tier_that_gets_less_than_was_asked_is_said(
    replay: Callable[..., Any], sessions_trace: Path
) -> None:
    huge = 1 << 37
    done = replay(
        sessions_trace, "--page-bytes", 4096, "--limit", 3, "--json", "-",
        "--tier", f"l0=256,l1=280,l2={huge}",
    )  # fmt: skip
    assert done.status == 0, done.err
    assert "the agent gave less than was asked for: nvme" in done.err
    settings = done.json["settings"]
    assert settings["tiers_asked"]["hbm"] == str(256 * 4096)
    assert settings["tiers_given_bytes"]["hbm"] == 256 * 4096
    assert int(settings["tiers_asked"]["nvme"]) > settings["tiers_given_bytes"]["nvme"] > 0
    assert settings["clamped"].startswith("nvme: ")


def test_another_page_size_than_the_agents_is_refused_with_a_reason(
    play: Callable[..., Any], sessions_trace: Path, shared_agent: Any
) -> None:
    play(sessions_trace, *shared_agent.arguments, "--limit", 1)
    done = play(sessions_trace, "--socket", shared_agent.socket, "--page-bytes", 8192)
    assert done.status == 1
    assert "Traceback" not in done.err
    assert "error: no agent takes this replay" in done.err


def test_bad_lines_are_counted_and_named(
    play: Callable[..., Any], shared_agent: Any, tmp_path: Path
) -> None:
    trace = tmp_path / "t.jsonl"
    good = '{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n'
    trace.write_text(good + "rubbish\n" + good)
    done = play(trace, *shared_agent.arguments, "--json", "-")
    assert done.status == 0, done.err
    assert done.json["bad_lines"]["count"] == 1
    assert done.json["bad_lines"]["first"][0].startswith("line 2:")
    assert "line 2" in done.err
