"""Generated traffic: the same seed gives the same requests, and they look like conversations."""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path

import pytest
from kvtier_agent.replay.sessions import SessionSettings, SessionTraffic
from kvtier_agent.replay.trace import Request, read_trace, write_trace


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return list(SessionTraffic(SessionSettings(seed=7)).requests(count=3000))


def test_a_seed_is_a_traffic(requests: list[Request]) -> None:
    again = list(SessionTraffic(SessionSettings(seed=7)).requests(count=300))
    other = list(SessionTraffic(SessionSettings(seed=8)).requests(count=300))
    as_rows = [(r.timestamp_milliseconds, r.hash_ids.tolist()) for r in requests[:300]]
    assert as_rows == [(r.timestamp_milliseconds, r.hash_ids.tolist()) for r in again]
    assert as_rows != [(r.timestamp_milliseconds, r.hash_ids.tolist()) for r in other]


def test_requests_come_in_order_and_are_well_formed(requests: list[Request]) -> None:
    times = [request.timestamp_milliseconds for request in requests]
    assert times == sorted(times)
    for request in requests:
        assert len(request.hash_ids) == -(-request.input_length // 512)
        assert 1 <= request.last_tokens <= 512
        assert request.partial_last == (request.input_length % 512 != 0)


def test_a_turn_repeats_all_that_was_full_before(requests: list[Request]) -> None:
    by_session: dict[str, list[Request]] = defaultdict(list)
    for request in requests:
        by_session[request.session_id].append(request)
    turns = 0
    for session in by_session.values():
        for before, after in itertools.pairwise(session):
            full = before.input_length // 512
            assert after.hash_ids[:full].tolist() == before.hash_ids[:full].tolist()
            turns += 1
    assert turns > 1000
    kinds = {name.split("-")[0] for name in by_session}
    assert kinds == {"agent", "chat"}


def test_one_id_has_one_place_in_one_chain(requests: list[Request]) -> None:
    places: dict[int, tuple[int, int]] = {}
    for request in requests:
        ids = request.hash_ids.tolist()
        for index, number in enumerate(ids):
            place = (index, ids[index - 1] if index else 0)
            assert places.setdefault(number, place) == place


def test_system_prompts_are_shared_and_sessions_are_not(requests: list[Request]) -> None:
    users: dict[int, set[str]] = defaultdict(set)
    for request in requests:
        for number in request.hash_ids.tolist():
            users[number].add(request.session_id)
    shared = [number for number, sessions in users.items() if len(sessions) > 1]
    assert max(len(sessions) for sessions in users.values()) > 20
    assert len(shared) < len(users) / 10


def test_traffic_ends_by_count_or_by_time() -> None:
    traffic = SessionTraffic(SessionSettings(seed=1, sessions_per_second=5))
    timed = list(traffic.requests(seconds=20))
    assert timed
    assert max(request.timestamp_milliseconds for request in timed) < 20_000
    assert list(SessionTraffic(SessionSettings()).requests(count=0)) == []


def test_generated_traces_are_traces(tmp_path: Path, requests: list[Request]) -> None:
    path = tmp_path / "t.jsonl.gz"
    write_trace(path, iter(requests))
    trace = read_trace(path)
    assert (len(trace.requests), trace.bad_line_count) == (len(requests), 0)
    assert trace.requests[77].session_id == requests[77].session_id
