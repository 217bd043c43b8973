"""Reading traces: what is a request, what is a bad line, and that neither is ever a traceback."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from kvtier_agent.replay.errors import ReplayError
from kvtier_agent.replay.trace import MAX_LINE_BYTES, read_trace, write_trace


def line(
    timestamp: float = 0, length: int = 1200, ids: list[int] | None = None, **more: object
) -> str:
    ids = [1, 2, 3] if ids is None else ids
    row = {
        "timestamp": timestamp,
        "input_length": length,
        "output_length": 7,
        "hash_ids": ids,
        **more,
    }
    return json.dumps(row) + "\n"


def test_a_request_carries_its_blocks_and_the_tokens_of_the_last(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(line(5, session_id="s") + "\n" + line(9, 1024, [1, 2], session_id=4))
    trace = read_trace(path)
    first, second = trace.requests
    assert first.hash_ids.tolist() == [1, 2, 3]
    assert (first.last_tokens, first.partial_last, first.session_id) == (1200 - 1024, True, "s")
    assert (second.last_tokens, second.partial_last, second.session_id) == (512, False, "4")
    assert (trace.blocks, trace.tokens, trace.bad_line_count) == (5, 2224, 0)


def test_no_partial_drops_only_a_last_block_that_is_not_full(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(line(0, 1200, [1, 2, 3]) + line(0, 1024, [1, 2]) + line(0, 1200, [1, 2]))
    trace = read_trace(path, partial=False)
    assert [request.hash_ids.tolist() for request in trace.requests] == [[1, 2], [1, 2], [1, 2]]
    assert not any(request.partial_last for request in trace.requests)
    assert trace.tokens == 1200 + 1024 + 1200, "tokens without a page are still recomputed"


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("{not json}\n", "JSON"),
        ("[]\n", "object"),
        ('{"timestamp": 0, "input_length": 5}\n', "hash_ids"),
        ('{"timestamp": 0, "input_length": "x", "hash_ids": []}\n', "input_length"),
        ('{"timestamp": -1, "input_length": 5, "hash_ids": [1]}\n', "timestamp"),
        ('{"timestamp": 0, "input_length": 5, "hash_ids": [-1]}\n', "hash_ids"),
        ('{"timestamp": 0, "input_length": 5, "hash_ids": [1.5]}\n', "hash_ids"),
        (f'{{"timestamp": 0, "input_length": 5, "hash_ids": [{1 << 64}]}}\n', "64 bits"),
        (line(0, 5000, [1, 2, 3]), "--block-tokens"),
        (line(0, 500, [1, 2, 3]), "--block-tokens"),
    ],
)
def test_a_bad_line_is_skipped_and_named(tmp_path: Path, bad: str, says: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(line(1) + bad + line(2))
    trace = read_trace(path)
    assert len(trace.requests) == 2
    assert trace.bad_line_count == 1
    assert trace.bad_lines[0].number == 2
    assert says in trace.bad_lines[0].reason


def test_bytes_that_are_no_text_are_a_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(line().encode() + b"\xff\xfe\x00garbage\n" + line().encode())
    trace = read_trace(path)
    assert (len(trace.requests), [bad.number for bad in trace.bad_lines]) == (2, [2])


def test_an_endless_line_is_one_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with path.open("wb") as out:
        out.write(line().encode() + b"x" * (MAX_LINE_BYTES + 4096) + b"\n" + line().encode())
    trace = read_trace(path)
    assert (len(trace.requests), [bad.number for bad in trace.bad_lines]) == (2, [2])


def test_too_many_bad_lines_stop_the_reading_with_the_first_of_them(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(line() + "bad\n" * 4)
    assert read_trace(path, max_bad_lines=4).bad_line_count == 4
    with pytest.raises(ReplayError, match=r"more than 3 bad lines .*line 2: .*JSON"):
        read_trace(path, max_bad_lines=3)


def test_a_compressed_file_cut_short_gives_what_came_before(tmp_path: Path) -> None:
    whole = gzip.compress(
        "".join(line(n, ids=[n * 7919, n + 1, n + 2]) for n in range(5000)).encode()
    )
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(whole[: len(whole) // 2])
    trace = read_trace(path)
    assert 100 < len(trace.requests) < 5000
    assert trace.bad_line_count == 1
    assert "damaged" in trace.bad_lines[0].reason
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    path.write_bytes(flipped)
    assert read_trace(path, max_bad_lines=10_000).bad_line_count >= 1


def test_compression_is_told_by_content_not_by_name(tmp_path: Path) -> None:
    path = tmp_path / "misnamed.jsonl"
    path.write_bytes(gzip.compress(line().encode()))
    assert len(read_trace(path).requests) == 1


def test_a_user_is_told_in_one_line_what_is_wrong_with_the_file(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    for path, says in [
        (tmp_path / "absent", "no such trace"),
        (tmp_path, "cannot be read"),
        (empty, "no usable request"),
    ]:
        with pytest.raises(ReplayError, match=says) as caught:
            read_trace(path)
        assert "\n" not in str(caught.value)


def test_limit_counts_good_requests(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("bad\n" + line() * 5)
    assert len(read_trace(path, limit=3).requests) == 3


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_what_is_written_reads_back_the_same(tmp_path: Path, name: str) -> None:
    source = tmp_path / "source.jsonl"
    source.write_text(line(3, session_id="a") + line(4, 1024, [9, 1 << 60]))
    trace = read_trace(source)
    assert write_trace(tmp_path / name, iter(trace.requests)) == 2
    again = read_trace(tmp_path / name)
    for left, right in zip(trace.requests, again.requests, strict=True):
        assert np.array_equal(left.hash_ids, right.hash_ids)
        assert (left.input_length, left.session_id) == (right.input_length, right.session_id)
