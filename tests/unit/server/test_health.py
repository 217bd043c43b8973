"""Health, readiness and metrics are true: red for each dead loop, ready after a real round trip."""

from __future__ import annotations

import contextlib
import socket
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.server import probe
from kvtier_agent.server.client import Client
from kvtier_agent.server.http import MOST_REQUESTS, HttpServer
from kvtier_agent.server.settings import ServerError
from kvtier_agent.supervise import Supervisor
from prometheus_client.parser import text_string_to_metric_families

Get = Callable[[int, str], tuple[int, str]]


def restarts(agent: Any, loop: str) -> int:
    return next(x.restarts for x in agent.supervisor.health() if x.name == loop)


@pytest.fixture
def port(agent: Any) -> int:
    return int(agent.http.address[1])


def test_a_healthy_agent_says_ok(
    agent: Any, port: int, get: Get, until: Callable[..., bool]
) -> None:
    assert until(lambda: get(port, "/healthz") == (200, "ok\n"))


def test_health_is_served_while_the_agent_starts(get: Get) -> None:
    supervisor = Supervisor()
    http = HttpServer("127.0.0.1", 0, supervisor)
    http.cause = "reading the index of volume data0"
    supervisor.start("http", http.run)
    try:
        assert get(http.address[1], "/healthz") == (200, "ok\n")
        status, text = get(http.address[1], "/readyz")
        assert status == 503
        assert text == "starting: reading the index of volume data0\n"
        assert get(http.address[1], "/metrics")[0] == 200
    finally:
        supervisor.stop()
        http.close()


def test_a_dead_cache_loop_turns_health_and_readiness_red(
    agent: Any, port: int, get: Get, until: Callable[..., bool]
) -> None:
    agent.supervisor.kill("cache", hold=True)
    assert until(lambda: get(port, "/healthz")[0] == 503)
    text = get(port, "/healthz")[1]
    assert text.startswith("cache: ")
    assert "LoopKilledError" in text
    assert get(port, "/readyz")[0] == 503
    counter = 'kv_loop_restarts_total{loop="cache"}'
    assert counter in get(port, "/metrics")[1]
    agent.supervisor.revive("cache")
    assert until(lambda: get(port, "/healthz") == (200, "ok\n"))
    assert until(lambda: get(port, "/readyz")[0] == 200)


def test_clients_keep_working_over_a_restart_of_the_loop(
    agent: Any,
    connect: Callable[..., Client],
    pages_of: Callable[..., Any],
    until: Callable[..., bool],
) -> None:
    client, pages = connect(agent.socket()), pages_of(1, 4)
    client.put(pages.keys, pages.bytes)
    agent.supervisor.kill("cache")
    assert until(lambda: restarts(agent, "cache") == 1)
    assert until(client.ping)
    assert client.lookup(pages.keys).prefix == 4
    assert client.counters.connects == 1


def test_a_dead_http_loop_answers_nobody(
    agent: Any, port: int, get: Get, until: Callable[..., bool]
) -> None:
    agent.supervisor.kill("http", hold=True)
    assert until(lambda: any(c.startswith("http: died") for c in agent.supervisor.causes()))
    agent.supervisor.revive("http")
    assert until(lambda: get(port, "/healthz") == (200, "ok\n"))


def test_every_loop_of_the_agent_is_supervised_and_seen(
    agent: Any, port: int, get: Get, until: Callable[..., bool]
) -> None:
    """The mover's threads too: whichever dies, health says its name."""
    names = agent.supervisor.names()
    assert {"http", "cache"} <= set(names)
    for name in names:
        if name == "http":
            continue
        agent.supervisor.kill(name, hold=True)
        if name != "cache":
            agent.loop.wake()
        assert until(lambda name=name: get(port, "/healthz")[1].startswith(f"{name}: "))
        agent.supervisor.revive(name)
        assert until(lambda: get(port, "/healthz") == (200, "ok\n"))


def test_ready_means_a_page_went_in_and_came_back(
    agent: Any, port: int, get: Get, connect: Callable[..., Client], until: Callable[..., bool]
) -> None:
    assert until(
        lambda: get(port, "/readyz") == (200, "default: ready, no engine has connected yet\n")
    )
    client = connect(agent.socket())
    wanted = (200, "default: ready, a page was stored, loaded and verified\n")
    assert until(lambda: get(port, "/readyz") == wanted)
    counters = client.stats()["counters"]
    assert (counters["asked_pages"], counters["hits_l0"], counters["misses"]) == (0, 0, 0)


def test_without_a_policy_the_agent_is_ready_and_says_that_it_stores_nothing(
    make_agent: Callable[..., Any],
    get: Get,
    connect: Callable[..., Client],
    until: Callable[..., bool],
) -> None:
    agent = make_agent(admitting=False)
    connect(agent.socket())
    port = agent.http.address[1]
    assert until(lambda: "no policy is in force" in get(port, "/readyz")[1])
    assert get(port, "/readyz")[0] == 200


def test_a_page_that_comes_back_wrong_is_not_ready(
    agent: Any, port: int, get: Get, connect: Callable[..., Client], until: Callable[..., bool]
) -> None:
    client = connect(agent.socket())
    assert until(lambda: "verified" in get(port, "/readyz")[1])
    connection = client._link.connection
    assert connection is not None
    for arena in connection.arenas.values():
        arena.view(0, 2 << 20)[:] ^= 1
    assert until(lambda: get(port, "/readyz")[0] == 503)
    assert "does not match its checksum" in get(port, "/readyz")[1]
    assert until(lambda: get(port, "/readyz")[0] == 200)


def test_metrics_are_prometheus_text_with_the_names_that_alerts_use(
    agent: Any,
    port: int,
    get: Get,
    connect: Callable[..., Client],
    pages_of: Callable[..., Any],
    until: Callable[..., bool],
) -> None:
    client, pages = connect(agent.socket()), pages_of(1, 4)
    client.lookup(pages.keys)
    client.put(pages.keys, pages.bytes)
    found = client.lookup(pages.keys)
    with client.load(pages.keys[: found.load]) as lease:
        assert lease.copy_to(np.zeros((4, client.page_bytes), np.uint8)).all()

    def value(name: str, **labels: str) -> float | None:
        for family in text_string_to_metric_families(get(port, "/metrics")[1]):
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return float(sample.value)
        return None

    assert until(lambda: value("kv_cache_hit_total", layer="miss") == 4)
    assert until(lambda: sum(value("kv_cache_hit_total", layer=str(i)) or 0 for i in range(3)) == 4)
    assert value("kv_cache_hit_tokens_total", layer="miss") == 4 * 16
    assert (value("kv_page_table_size_bytes") or 0) > 0
    assert value("kv_clients", domain="default") == 1
    assert value("kv_evictions_total", layer="2") == 0
    assert value("kv_tier_capacity_bytes", domain="default", layer="0") == 2 << 20
    assert value("kv_refused_puts_total", domain="default", reason="space") == 0
    text = get(port, "/metrics")[1]
    for name in (
        "kv_quarantined_pages_total", "kv_nvme_written_bytes_total", "kv_leases",
        "kv_messages_total", "kv_write_queue_bytes", "kv_loop_restarts_total",
    ):  # fmt: skip
        assert f"\n{name}" in text


def test_latencies_have_the_buckets_that_dashboards_use(
    make_agent: Callable[..., Any],
    get: Get,
    connect: Callable[..., Client],
    pages_of: Callable[..., Any],
    until: Callable[..., bool],
) -> None:
    agent = make_agent(l0=1 << 20)
    client, pages = connect(agent.socket()), pages_of(1, 100)
    for start in range(0, 100, 10):
        client.put(pages.keys[start : start + 10], pages.bytes[start : start + 10])
    port = agent.http.address[1]
    wanted = 'kv_offload_latency_seconds_bucket{dst_layer="1",le="%s",src_layer="0"}'
    assert until(lambda: wanted % "0.001" in get(port, "/metrics")[1])
    text = get(port, "/metrics")[1]
    for bound in ("0.001", "0.005", "0.01", "0.05", "0.1", "0.5", "+Inf"):
        assert wanted % bound in text


def test_an_agent_with_all_the_clients_it_may_have_is_ready(
    make_agent: Any, connect: Any, get: Get, until: Callable[..., bool]
) -> None:
    full = make_agent(server={"max_clients": 2})
    port = full.http.address[1]
    assert all(connect(full.socket()).connected for _ in range(2))
    third = connect(full.socket())
    assert "2 clients are connected, which is the limit" in third.counters.last_error
    assert until(lambda: "stored, loaded and verified" in get(port, "/readyz")[1])
    assert get(port, "/readyz")[0] == 200


def test_a_domain_that_cannot_be_tried_is_said_and_the_others_are_tried(
    make_agent: Any,
    connect: Any,
    get: Get,
    until: Callable[..., bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = make_agent(domains={"chat": None, "search": None})
    connect(agent.socket("chat"))
    connect(agent.socket("search"))
    real = probe.Client

    def client(socket: Any, *about: Any, **options: Any) -> Client:
        if socket.stem == "chat":
            raise MemoryError
        return real(socket, *about, **options)

    monkeypatch.setattr(probe, "Client", client)
    port = agent.http.address[1]
    assert until(lambda: "search: ready, a page was stored" in get(port, "/readyz")[1])
    status, text = get(port, "/readyz")
    assert status == 503
    assert "chat: MemoryError\n" in text


def test_a_probe_holds_one_copy_of_its_page(
    make_agent: Any, connect: Any, until: Callable[..., bool]
) -> None:
    page = 8 << 20
    agent = make_agent(l0=0, l1=8 * page, l2=0)
    connect(agent.socket(), Geometry.of_page_bytes(page, 16))
    assert until(lambda: agent.loop.snapshot.domains["default"].geometry is not None)
    one = probe.Probe(agent.run_dir, lambda: agent.loop.snapshot)
    tracemalloc.start()
    try:
        for _ in range(2):  # the first one stores it
            assert one.check() == (True, ["default: ready, a page was stored, loaded and verified"])
        assert tracemalloc.get_traced_memory()[1] < 1.8 * page
    finally:
        tracemalloc.stop()
        one.close()


def test_of_huge_pages_only_the_way_in_is_tried(
    agent: Any, connect: Any, until: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    connect(agent.socket())
    assert until(lambda: agent.loop.snapshot.domains["default"].geometry is not None)
    monkeypatch.setattr(probe, "MOST_BYTES", 16_383)
    monkeypatch.setattr(probe, "_page", None)
    one = probe.Probe(agent.run_dir, lambda: agent.loop.snapshot)
    try:
        ready, (line,) = one.check()
    finally:
        one.close()
    assert ready
    assert "too large to be tried" in line


def test_other_paths_say_what_there_is(agent: Any, port: int, get: Get) -> None:
    status, text = get(port, "/")
    assert status == 404
    assert "/healthz" in text


def test_connections_held_open_without_a_word_do_not_keep_the_probe_out(
    agent: Any, port: int, get: Get
) -> None:
    held = [socket.create_connection(("127.0.0.1", port)) for _ in range(2 * MOST_REQUESTS)]
    try:
        for connection in held:
            with contextlib.suppress(OSError):  # ended already for the one after it
                connection.sendall(b"GET /healthz HTTP/1.0\r\n")
        answers = [get(port, "/healthz")[0] for _ in range(5)]
    finally:
        for connection in held:
            connection.close()
    assert answers == [200] * 5


def test_an_address_in_use_is_said(agent: Any, port: int) -> None:
    with pytest.raises(ServerError, match="--http"):
        HttpServer("127.0.0.1", port, Supervisor())


def test_what_the_journal_takes_and_what_failed_is_in_the_metrics(
    agent: Any,
    port: int,
    get: Get,
    connect: Callable[..., Client],
    pages_of: Callable[..., Any],
    until: Callable[..., bool],
) -> None:
    client, pages = connect(agent.socket()), pages_of(1, 20)
    for _ in range(40):
        client.put(pages.keys, pages.bytes)
        pages.keys[:, 0] += 1
    folder = agent.folder / "volume-default"

    def shown(name: str) -> float:
        text = get(port, "/metrics")[1]
        return float(text.split(f'\n{name}{{domain="default"}} ')[1].split()[0])

    def on_disk() -> int:
        files = [*folder.rglob("journal-*"), *folder.rglob("checkpoint-*")]
        return sum(file.stat().st_blocks * 512 for file in files)

    # But for what the file system takes for itself beside.
    assert until(lambda: shown("kv_journal_bytes") > 0), client.stats()
    assert until(lambda: abs(shown("kv_journal_bytes") - on_disk()) <= 4 * 4096), on_disk()
    assert shown("kv_failed_checkpoints_total") == 0
    agent.core.nvme._checkpoints.failures = 3
    assert until(lambda: shown("kv_failed_checkpoints_total") == 3)
