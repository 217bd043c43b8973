"""Looking into a running agent from outside, without asking it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from kvtier_agent.cache.record import RECORD, State
from kvtier_agent.server.client import Client
from kvtier_agent.server.inspection import summarise
from kvtier_cli.main import app
from typer.testing import CliRunner


def records(chains: int, length: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    table = np.zeros(chains * length, RECORD)
    table["key"] = rng.integers(1, 1 << 62, (len(table), 2))
    table["state"] = State.IN1
    table["size"] = 100
    table["last_access"] = 90.0
    for i in range(len(table)):
        if i % length:
            table["parent"][i] = table["key"][i - 1]
        table["depth"][i] = (i % length) * 16
    return table


def test_chains_are_counted_by_their_first_page() -> None:
    table = records(3, 50)
    first = table["key"][0].tobytes().hex()
    table["hits"][7] = 5
    found = summarise(np.random.default_rng(2).permutation(table), now=100.0, top=2)
    assert found["pages"] == 150
    assert len(found["top_prefixes"]) == 2
    everything = summarise(table, now=100.0)["top_prefixes"]
    assert [prefix["pages"] for prefix in everything] == [50, 50, 50]
    mine = next(prefix for prefix in everything if prefix["key"] == first)
    assert mine == {
        "key": first, "pages": 50, "bytes": 5000, "hits": 5, "longest_tokens": 49 * 16,
        "idle_seconds": 10.0,
    }  # fmt: skip


def test_a_page_whose_parent_was_evicted_begins_a_chain() -> None:
    table = records(1, 10)
    found = summarise(table[[0, 1, 2, 5, 6]], now=100.0)["top_prefixes"]
    assert [prefix["pages"] for prefix in found] == [3, 2]


def test_an_empty_table_is_all_zeros() -> None:
    found = summarise(np.zeros(0, RECORD), now=1.0)
    assert found["pages"] == 0
    assert found["tiers"]["hbm"]["idle_seconds"] is None
    assert found["top_prefixes"] == []


def inspect(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["inspect", *arguments])


def test_what_a_dead_agent_left_is_shown_as_such(
    start_agent: Callable[..., Any], connect: Callable[..., Client], pages_of: Callable[..., Any]
) -> None:
    process, pages = start_agent(), pages_of(1, 4)
    client = connect(process.socket())
    assert client.put(pages.keys, pages.bytes).stored == 4
    run = str(process.folder / "run")
    assert json.loads(inspect("--run-dir", run, "--json", "-").stdout)["running"] is True
    process.kill()
    done = inspect("--run-dir", run)
    assert done.exit_code == 1
    assert "no agent runs on" in done.stderr
    assert "this is what one that was killed has left" in done.stderr
    assert "4 pages" in done.stdout
    left = json.loads(inspect("--run-dir", run, "--json", "-").stdout)
    assert left["running"] is False
    assert left["domains"]["default"]["pages"] == 4


def test_a_table_that_is_none_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "default.pages").mkdir()
    done = inspect("--run-dir", str(tmp_path))
    assert done.exit_code == 1
    assert "is no page table: it is no file" in done.stderr
    (tmp_path / "default.pages").rmdir()
    os.mkfifo(tmp_path / "default.pages")
    assert "it is no file" in inspect("--run-dir", str(tmp_path)).stderr


def test_the_command_shows_what_the_agent_holds(
    agent: Any, connect: Callable[..., Client], pages_of: Callable[..., Any]
) -> None:
    client, pages = connect(agent.socket()), pages_of(1, 20)
    client.put(pages.keys, pages.bytes)
    lease = client.load(pages.keys[:5])
    done = inspect("--run-dir", str(agent.run_dir), "--json", "-")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)["domains"]["default"]
    assert found["pages"] == 20
    assert found["pinned_pages"] == 5
    assert found["tiers"]["hbm"]["pages"] + found["tiers"]["dram"]["pages"] == 20
    assert found["bytes"] == 20 * 16384
    prefix = found["top_prefixes"][0]
    assert (prefix["pages"], prefix["key"]) == (20, pages.keys[0].tobytes().hex())
    client.pin(pages.keys[4:7])  # one of them leased as well
    client.delete(pages.keys[:1])
    done = inspect("--run-dir", str(agent.run_dir), "--json", "-")
    found = json.loads(done.stdout)["domains"]["default"]
    assert (found["pinned_pages"], found["pins"]) == (7, 8)
    assert (found["client_pinned_pages"], found["client_pinned_bytes"]) == (3, 3 * 16384)
    assert found["marked_pages"] == 1
    shown = inspect("--run-dir", str(agent.run_dir))
    assert shown.exit_code == 0
    assert "20 pages, 7 pinned (3 by clients)" in shown.stdout
    lease.release()


def test_a_folder_without_an_agent_is_one_clear_line(tmp_path: Path) -> None:
    for arguments in (
        ("--run-dir", str(tmp_path / "nowhere")),
        ("--run-dir", str(tmp_path), "--domain", "x"),
    ):
        done = inspect(*arguments)
        assert done.exit_code == 1
        assert done.stderr.startswith("error: ")
        assert len(done.stderr.splitlines()) == 1


def test_a_file_that_is_no_page_table_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "default.pages").write_bytes(b"not a table" * 1000)
    done = inspect("--run-dir", str(tmp_path))
    assert done.exit_code == 1
    assert "no page table" in done.stderr


def test_suspect_segments_are_named(agent: Any, until: Callable[..., bool]) -> None:
    def shown() -> Any:
        done = inspect("--run-dir", str(agent.run_dir), "--json", "-")
        return json.loads(done.stdout)["domains"]["default"]["suspect_segments"]

    assert shown() == {"count": 0, "numbers": []}
    books = agent.core.cache.shelves.pool2
    suspect = np.zeros(40, dtype=bool)
    suspect[10:30] = True
    agent.call(lambda: setattr(books, "_suspect", suspect))
    assert until(lambda: shown() == {"count": 20, "numbers": list(range(10, 26))})
    text = " ".join(inspect("--run-dir", str(agent.run_dir)).stdout.split())
    assert "suspect segments of NVMe: 20, among them 10, 11," in text
    agent.call(lambda: setattr(books, "_suspect", np.zeros(0, dtype=bool)))
    assert until(lambda: shown()["count"] == 0)
