"""Tenants through the socket: whose pages they are, what a quota refuses, what it shows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from kvtier_agent.cache.identity import KEY_VERSION, root_key
from kvtier_agent.cache.results import PutStatus
from kvtier_agent.cache.settings import TenantQuota
from kvtier_agent.server import protocol as p
from kvtier_agent.server.client import Client, Stored
from raw_peer import GEOMETRY, Raw

Make = Callable[..., Any]
KIB = 1 << 10


@pytest.fixture
def agent(make_agent: Make) -> Any:
    """DRAM of 64 pages, of which `search` may have 8."""
    agent = make_agent(l0=0, l1=64 * 16 * KIB, l2=0)
    behaviour = replace(agent.behaviour, quotas=(TenantQuota("search", dram_percent=13),))
    agent.call(lambda: agent.core.reconfigure(time.monotonic(), behaviour, agent.budgets))
    return agent


def test_a_tenant_has_its_quota_and_no_more(
    agent: Any, connect: Make, pages_of: Make, get: Make, until: Callable[..., bool]
) -> None:
    search, chat = connect(agent.socket(), tenant="search"), connect(agent.socket(), tenant="chat")
    pages = pages_of(1, 12)
    status = search.put(pages.keys, pages.bytes).status.tolist()
    assert status == [Stored.STORED] * 8 + [Stored.REFUSED_QUOTA] * 4
    others = pages_of(2, 12)
    assert chat.put(others.keys, others.bytes).stored == 12
    newer = pages_of(3, 6)
    assert search.put(newer.keys, newer.bytes).stored == 6  # in place of its own coldest
    assert chat.lookup(others.keys).prefix == 12
    told = search.stats()["tenants"]["search"]
    assert told["used_bytes"][1] <= told["quota_bytes"][1] == 8 * 16 * KIB
    assert (told["quota_bytes"][0], told["refused_pages"]) == (None, 4)
    port = agent.http.address[1]
    wanted = [
        'kv_tenant_quota_bytes{domain="default",layer="1",tenant="search"} 131072.0',
        'kv_tenant_used_bytes{domain="default",layer="1",tenant="(others)"} 196608.0',
        'kv_tenant_refused_pages_total{domain="default",tenant="search"} 4.0',
        'kv_refused_puts_total{domain="default",reason="quota"} 4.0',
    ]
    assert until(lambda: all(line in get(port, "/metrics")[1] for line in wanted)), get(
        port, "/metrics"
    )
    assert 'tenant="chat"' not in get(port, "/metrics")[1]  # as many labels as the policy lists


def test_tenants_share_no_page_unless_they_share_a_salt(
    agent: Any, connect: Make, pages_of: Make
) -> None:
    search, chat = connect(agent.socket(), tenant="search"), connect(agent.socket(), tenant="chat")
    nobody = connect(agent.socket())
    assert len({search.root, chat.root, nobody.root}) == 3
    assert nobody.root == root_key(GEOMETRY.fingerprint)
    one = connect(agent.socket(), tenant="search", tenant_salt=b"common")
    other = connect(agent.socket(), tenant="chat", tenant_salt=b"common")
    assert one.root == other.root == root_key(GEOMETRY.fingerprint, b"common")


def test_a_client_of_the_release_before_is_told_what_it_knows(agent: Any, pages_of: Make) -> None:
    raw = Raw(agent.socket())
    try:
        welcome = raw.hello(oldest=1, newest=1, tenant="search")
        assert isinstance(welcome, p.Welcome)
        with raw.lifeline(welcome) as line:
            line.recv(2)
            keys = pages_of(1, 10).keys
            raw.socket.send_multipart([p.encode(p.Reserve(2)), keys.tobytes()])
            assert raw.socket.poll(5000)
            status = np.frombuffer(raw.socket.recv_multipart()[1], np.uint8).tolist()
        assert status == [PutStatus.OFFERED] * 8 + [PutStatus.REFUSED_SPACE] * 2
    finally:
        raw.close()


def test_a_name_that_is_none_is_refused(agent: Any) -> None:
    for wrong in ("Search", "a b", "-", "x" * 64, 7):
        with pytest.raises(ValueError, match="give up to 63 lower-case letters"):
            Client(agent.socket(), GEOMETRY, tenant=wrong)  # type: ignore[arg-type]
    raw = Raw(agent.socket())
    try:
        hello = msgspec.to_builtins(
            p.Hello(1, 1, 2, 1, KEY_VERSION, p.GeometryInfo.of(GEOMETRY), tenant="ok")
        )
        hello[-1] = "(others)"
        reply = raw.ask(msgspec.msgpack.encode(hello))
        assert isinstance(reply, p.Refused)
        assert reply.code == p.Code.MALFORMED
    finally:
        raw.close()


def test_two_engines_that_computed_the_same_page_leave_one_copy(
    agent: Any, connect: Make, pages_of: Make
) -> None:
    one, other, pages = connect(agent.socket()), connect(agent.socket()), pages_of(1, 4)
    first = one.reserve(pages.keys)
    assert first.status.tolist() == [PutStatus.OFFERED] * 4
    # The other is told that somebody is writing them, and waits for nothing.
    assert other.put(pages.keys, pages.bytes).status.tolist() == [Stored.BUSY] * 4
    first.write_rows(pages.bytes)
    assert first.commit().tolist() == [Stored.STORED] * 4
    assert other.put(pages.keys, pages.bytes).status.tolist() == [Stored.EXISTS] * 4
    assert agent.call(lambda: agent.core.cache.table.pages) == 4
    assert agent.call(lambda: agent.core.cache.shelves.pools[1].used) == 4
    out = np.zeros_like(pages.bytes)
    with other.load(pages.keys) as lease:
        assert lease.copy_to(out).all()
    assert np.array_equal(out, pages.bytes)


def test_when_the_engine_that_was_first_dies_the_other_stores_the_page(
    agent: Any, connect: Make, pages_of: Make, until: Callable[..., bool]
) -> None:
    one, other, pages = connect(agent.socket()), connect(agent.socket()), pages_of(1, 4)
    one.reserve(pages.keys)
    assert other.put(pages.keys, pages.bytes).status.tolist() == [Stored.BUSY] * 4
    one.close()
    assert until(lambda: other.put(pages.keys, pages.bytes).stored == 4)
    assert agent.call(lambda: agent.core.cache.shelves.pools[1].used) == 4
