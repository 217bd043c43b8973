"""A whole agent as a process, run alone: pages in and out, live edits, restarts, the end."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from agent_process import AgentProcess
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.identity import chain_keys
from kvtier_agent.server.client import Client

MI = 1 << 20
GEOMETRY = Geometry.of_page_bytes(64 * 1024, 256)


def policy(hbm: str = "4Mi", dram: str = "8Mi", more: str = "") -> str:
    return f"""
apiVersion: kvtier.io/v1alpha1
kind: KVTierPolicy
metadata: {{name: alone}}
spec:
  tiers: {{hbm: {{size: {hbm}}}, dram: {{size: {dram}}},
    nvme: {{size: 64Mi, volumes: [data0], reservePercent: 0}}}}
  valueDensity: {{model: classic}}
{more}"""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    with AgentProcess(tmp_path, policy=policy()) as running:
        yield running.ready()


class Pages:
    """A chain of pages with known bytes."""

    def __init__(self, client: Client, count: int, seed: int) -> None:
        tokens = np.arange(count * 256, dtype=np.uint32) + np.uint32(seed << 20)
        self.client = client
        self.keys = chain_keys(client.root, tokens, 256)
        self.bytes = np.random.default_rng(seed).integers(
            0, 256, (count, client.page_bytes), dtype=np.uint8
        )

    def put(self) -> int:
        return self.client.put(self.keys, self.bytes).stored

    def held(self) -> int:
        """Leading pages that come back, each with its own bytes."""
        copy = np.zeros_like(self.bytes)
        with self.client.load(self.keys, deadline_milliseconds=3000) as lease:
            good = lease.copy_to(copy)
        n = len(good) if good.all() else int(np.argmin(good))
        assert np.array_equal(copy[:n], self.bytes[:n])
        return n


def connect(agent: AgentProcess) -> Client:
    client = Client(agent.socket, GEOMETRY, timeout_seconds=5.0)
    assert client.wait_connected(10.0)
    return client


def revision(agent: AgentProcess) -> str:
    return str(agent.status().get("revision", ""))


def sizes(agent: AgentProcess) -> dict[str, int]:
    return {t["name"]: t["capacityBytes"] for t in agent.status().get("tiers", [])}


def test_an_edit_is_live_and_keeps_what_still_fits(agent: AgentProcess) -> None:
    assert agent.get("/healthz") == (200, "ok\n")
    first = agent.until(lambda: revision(agent), "the revision is shown")
    with connect(agent) as client:
        small, boot = Pages(client, 16, 1), client.boot  # 1 MiB
        assert small.put() == 16
        assert agent.get("/readyz")[0] == 200

        agent.write_policy(policy(hbm="2Mi", dram="32Mi"))
        second = agent.until(
            lambda: revision(agent) not in ("", first) and revision(agent), "the edit is in force"
        )
        assert small.held() == 16, "shrinking to what still fits drops nothing"
        big = Pages(client, 300, 2)  # 19 MiB: more than there was room for before
        for start in range(0, 300, 20):
            part = slice(start, start + 20)
            agent.until(
                lambda part=part: (client.put(big.keys[part], big.bytes[part]).status <= 1).all(),
                "the pages are taken",
            )
        assert big.held() == 300

        # A wrong edit changes nothing and says so; so does one that cannot be applied.
        for text, reason in (
            ("spec: [", "InvalidRevision"),
            (policy(more="  surprise: 1\n"), "InvalidRevision"),
            (policy().replace("data0", "data9"), "VolumeUnknown"),
        ):
            agent.write_policy(text)
            agent.until(
                lambda reason=reason: agent.condition("Stalled")[:2] == ("True", reason),
                f"{reason} is said",
            )
            assert revision(agent) == second
            assert agent.condition("Ready")[:2] == ("True", "InForce")
            assert big.held() == 300
        agent.policy_file.unlink()
        agent.until(
            lambda: "No such file" in agent.condition("Stalled")[2], "the missing file is said"
        )
        assert revision(agent) == second
        agent.write_policy(policy())
        agent.until(lambda: revision(agent) == first, "the first policy is back")
        assert agent.condition("Stalled")[:2] == ("False", "Applied")
        assert client.boot == boot, "no restart in all this"
    assert agent.get("/healthz") == (200, "ok\n")


def test_sighup_reads_the_file_at_once(tmp_path: Path) -> None:
    with AgentProcess(tmp_path, "--poll-seconds", "60", policy=policy()) as agent:
        agent.ready()
        first = agent.until(lambda: revision(agent), "in force")
        agent.write_policy(policy(dram="16Mi"))
        time.sleep(6.0)
        assert revision(agent) == first, "the next look is a minute away"
        assert agent.get("/healthz") == (200, "ok\n"), "and the loop that waits is not stuck"
        agent.send(signal.SIGHUP)
        agent.until(lambda: revision(agent) != first, "the edit is in force", timeout=10.0)


def test_the_end_is_orderly_and_counters_go_on_after_it(tmp_path: Path) -> None:
    with AgentProcess(tmp_path, policy=policy()) as agent:
        agent.ready()
        with connect(agent) as client:
            pages = Pages(client, 20, 3)
            pages.put()
            assert pages.held() == 20
        started = time.monotonic()
        assert agent.stop() == 0
        assert time.monotonic() - started < 10.0
        assert agent.condition("Ready")[:2] == ("False", "Stopping")
        before = agent.status()["counters"]
        assert before["pagesStored"] == 20
        assert not agent.socket.exists()
        saved = json.loads((tmp_path / "state" / "state.json").read_text())
        assert saved["counters"]["pages_stored"] == 20

        agent.start().ready()
        agent.until(lambda: agent.condition("Ready")[:2] == ("True", "InForce"), "in force again")
        again = agent.status()
        assert again["counters"] == before
        assert again["bootID"] != ""
        with connect(agent) as client:
            Pages(client, 5, 4).put()
            agent.until(lambda: agent.status()["counters"]["pagesStored"] == 25, "counters add up")
        assert agent.stop(signal.SIGINT) == 0


def test_a_killed_agent_is_succeeded_by_one_that_clears_up(agent: AgentProcess) -> None:
    with connect(agent) as client:
        pages, boot = Pages(client, 10, 5), client.boot
        assert pages.put() == 10
        agent.stop(signal.SIGKILL)
        assert client.lookup(pages.keys).prefix == 0, "no agent: nothing cached, no error"
        agent.start().ready()
        assert client.wait_connected(20.0)
        assert client.boot != boot
        assert pages.put() + int(pages.held()) >= 10
        assert pages.held() == 10


def test_where_the_engine_is_l0_its_pool_is_the_base_of_dram(tmp_path: Path) -> None:
    ratio = policy().replace("hbm: {size: 4Mi}, dram: {size: 8Mi}", "dram: {ratioToHBM: 4}")
    options = ("--l0", "engine", "--device-memory", "20Mi")
    with AgentProcess(tmp_path, *options, policy=ratio) as agent:
        agent.ready()
        agent.until(
            lambda: agent.condition("Ready")[:2] == ("True", "PartlyApplied"), "what is not obeyed"
        )
        assert "tiers.hbm" in agent.status()["notApplied"]
        assert "no engine has registered" in agent.condition("Ready")[2]
        engine = Client(agent.socket, GEOMETRY, timeout_seconds=5.0, kv_pool_bytes=8 * MI)
        with engine:
            assert engine.wait_connected(10.0)
            agent.until(lambda: sizes(agent).get("dram") == 32 * MI, "4 times the engine's pool")
            pages = Pages(engine, 16, 7)
            assert pages.put() == 16
            assert set(engine.lookup(pages.keys).tiers.tolist()) == {1}, "no L0 of the agent's"
        # An engine that restarts finds its DRAM tier as it was, after some more looks at the facts.
        time.sleep(1.5)
        assert sizes(agent)["dram"] == 32 * MI
        with connect(agent) as again:
            assert Pages(again, 16, 7).held() == 16


def test_where_the_engine_is_l0_a_restart_finds_all_of_dram(tmp_path: Path) -> None:
    """The stand-in for its pool, 4 MiB, is in force at no time: pages would leave DRAM for it."""
    ratio = policy().replace("hbm: {size: 4Mi}, dram: {size: 8Mi}", "dram: {ratioToHBM: 4}")
    options = ("--l0", "engine", "--device-memory", "20Mi")
    with AgentProcess(tmp_path, *options, policy=ratio) as agent:
        agent.ready()
        with Client(agent.socket, GEOMETRY, timeout_seconds=5.0, kv_pool_bytes=8 * MI) as engine:
            assert engine.wait_connected(10.0)
            agent.until(lambda: sizes(agent).get("dram") == 32 * MI, "4 times the engine's pool")
            pages = Pages(engine, 400, 8)  # 25 MiB
            assert pages.put() == 400
            saved = agent.root / "state" / "state.json"
            agent.until(
                lambda: json.loads(saved.read_text())["enginePoolBytes"] == 8 * MI, "it is kept"
            )
        agent.stop(signal.SIGKILL)
        agent.start().ready()
        time.sleep(1.5)  # some looks at the facts, with no engine there
        assert sizes(agent)["dram"] == 32 * MI
        assert "no engine has registered" not in agent.condition("Ready")[2]
        with Client(agent.socket, GEOMETRY, timeout_seconds=5.0, kv_pool_bytes=8 * MI) as engine:
            assert engine.wait_connected(10.0)
            assert (engine.lookup(pages.keys).tiers == 1).all()


def test_an_engine_with_other_pages_is_served_and_said(tmp_path: Path) -> None:
    with AgentProcess(tmp_path, policy=policy(more="  page: {tokens: 512}")) as agent:
        agent.ready()
        agent.until(lambda: agent.condition("Ready")[1] == "InForce", "the first report")
        with connect(agent) as engine:
            agent.until(lambda: agent.condition("Ready")[1] == "PartlyApplied", "said")
            assert agent.condition("Ready")[0] == "True"
            assert agent.status()["notApplied"] == ["page.tokens"]
            assert Pages(engine, 8, 9).put() == 8


def test_two_domains_share_the_tiers_and_nothing_else(tmp_path: Path) -> None:
    options = ("--domain", "one", "--domain", "two")
    with AgentProcess(tmp_path, *options, policy=policy()) as agent:
        agent.ready()
        with (
            Client(agent.short / "one.sock", GEOMETRY, timeout_seconds=5.0) as one,
            Client(agent.short / "two.sock", GEOMETRY, timeout_seconds=5.0) as two,
        ):
            assert one.wait_connected(10.0)
            assert two.wait_connected(10.0)
            pages = Pages(one, 8, 6)
            assert pages.put() == 8
            assert two.lookup(pages.keys).prefix == 0
            agent.until(lambda: sizes(agent).get("dram"), "tiers are shown")
            assert sizes(agent)["dram"] <= 8 * MI, "a size is the node's, not each domain's"
        assert sorted(p.name for p in (agent.volume / "kvtier").iterdir()) == ["one", "two"]
