"""Request traces in Mooncake's JSONL form, read so that a bad line is named and never fatal.

One line is one request: ``timestamp`` (milliseconds since the trace began), ``input_length`` and
``output_length`` (tokens), ``hash_ids`` (one integer per block of the prompt; the same integer
means the same tokens after the same blocks), optionally ``session_id``. The form was published
with the traces of Mooncake (FAST'25); one block there is 512 tokens. Fields that are not named
here are ignored.

Real traces are long, hand-edited, cut short by a full disk, or compressed twice. So a line that
cannot be used is skipped, counted and kept with its number and the reason (`BadLine`); only when
there are more of them than the limit does reading stop. A compressed file that ends early gives
everything up to that point and one bad line.

How many blocks a prompt has is checked against its length: with B tokens per block a prompt of L
tokens has floor(L/B) or ceil(L/B) blocks (some recorders drop a last block that is not full).
Anything else means that the trace was recorded with another block size, which would make every
figure of a replay wrong without a sign.

The whole trace is held in memory: 8 bytes per block and about 200 per request.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Annotated, cast

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier_agent.replay.errors import ReplayError
from kvtier_agent.replay.source import open_source

BLOCK_TOKENS = 512
"""Tokens per hash id in the published traces."""

MAX_LINE_BYTES = 32 << 20
"""A longer line is bad; it bounds memory when a file without line ends is given by mistake."""

MAX_BLOCKS_PER_REQUEST = 1 << 20
_NAMED_BAD_LINES = 1000

Ids = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace.

    Attributes:
        timestamp_milliseconds: when it arrived, since the trace began.
        input_length: tokens of the prompt, blocks or not.
        output_length: tokens answered.
        hash_ids: uint64[n], the prompt's blocks in order.
        last_tokens: tokens in the last block (`block_tokens` when it is full).
        partial_last: the last block is not full.
        session_id: the recorder's session, "" when it has none.
    """

    timestamp_milliseconds: float
    input_length: int
    output_length: int
    hash_ids: Ids
    last_tokens: int
    partial_last: bool
    session_id: str


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that could not be used: its number (from 1) and why."""

    number: int
    reason: str

    def __str__(self) -> str:
        return f"line {self.number}: {self.reason}"


@dataclass(slots=True)
class Trace:
    """A trace in memory, and what was wrong with it.

    `bad_lines` is bounded (the first thousand); `bad_line_count` is not.
    """

    requests: list[Request] = field(default_factory=list)
    block_tokens: int = BLOCK_TOKENS
    bad_lines: list[BadLine] = field(default_factory=list)
    bad_line_count: int = 0

    @property
    def blocks(self) -> int:
        """Block accesses: one per hash id of every request."""
        return sum(len(request.hash_ids) for request in self.requests)

    @property
    def tokens(self) -> int:
        """Prompt tokens of all requests, those without a block too."""
        return sum(request.input_length for request in self.requests)

    def note_bad(self, number: int, reason: str) -> None:
        self.bad_line_count += 1
        if len(self.bad_lines) < _NAMED_BAD_LINES:
            self.bad_lines.append(BadLine(number, reason))


class _Line(msgspec.Struct):
    """What one line must hold; the bounds are what the rest of replay can carry."""

    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e13)]
    input_length: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
    hash_ids: Annotated[
        list[Annotated[int, msgspec.Meta(ge=0)]],
        msgspec.Meta(max_length=MAX_BLOCKS_PER_REQUEST),
    ]
    output_length: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 0
    session_id: int | str | None = None


def read_trace(
    path: Path,
    *,
    block_tokens: int = BLOCK_TOKENS,
    max_bad_lines: int = 100,
    limit: int | None = None,
    partial: bool = True,
) -> Trace:
    """Read a trace, plain or gzip (told by its first bytes, not by its name).

    Args:
        path: the file, or a pipe.
        block_tokens: tokens per hash id.
        max_bad_lines: how many bad lines are skipped before reading stops.
        limit: read at most this many good requests.
        partial: False drops a last block that is not full.

    Raises:
        ReplayError: no such file, nobody writes to the pipe, no usable request, or more bad lines
            than allowed.
    """
    trace = Trace(block_tokens=block_tokens)
    decoder = msgspec.json.Decoder(_Line)
    for number, line in _numbered_lines(path, trace):
        if limit is not None and len(trace.requests) >= limit:
            break
        if line is not None and not line.strip():
            continue
        outcome = "" if line is None else _parse(decoder, line, block_tokens, partial)
        if isinstance(outcome, Request):
            trace.requests.append(outcome)
        elif outcome:
            trace.note_bad(number, outcome)
        if trace.bad_line_count > max_bad_lines:
            raise ReplayError(
                f"{path}: more than {max_bad_lines} bad lines (--max-bad-lines); "
                f"the first is {trace.bad_lines[0]}"
            )
    if not trace.requests:
        first = f"; the first bad one is {trace.bad_lines[0]}" if trace.bad_lines else ""
        raise ReplayError(f"{path}: no usable request in this file{first}")
    return trace


def write_trace(path: Path, requests: Iterator[Request]) -> int:
    """Write requests as JSONL (gzip when the name ends in .gz); returns how many."""
    count = 0
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wb") as out:
        for request in requests:
            row: dict[str, object] = {
                "timestamp": round(request.timestamp_milliseconds),
                "input_length": request.input_length,
                "output_length": request.output_length,
                "hash_ids": request.hash_ids.tolist(),
            }
            if request.session_id:
                row["session_id"] = request.session_id
            out.write(msgspec.json.encode(row) + b"\n")
            count += 1
    return count


def _numbered_lines(path: Path, trace: Trace) -> Iterator[tuple[int, bytes | None]]:
    """Lines with their numbers; None where the reader itself noted a bad one."""
    try:
        with open_source(path) as raw:
            magic = raw.peek(2)[:2]
            zipped = magic == b"\x1f\x8b"
            stream: IO[bytes] = cast(IO[bytes], gzip.GzipFile(fileobj=raw) if zipped else raw)
            number = 0
            while True:
                number += 1
                try:
                    line = stream.readline(MAX_LINE_BYTES + 1)
                    if len(line) > MAX_LINE_BYTES:
                        trace.note_bad(number, f"longer than {MAX_LINE_BYTES >> 20} MiB")
                        while line and not line.endswith(b"\n"):
                            line = stream.readline(MAX_LINE_BYTES)
                        yield number, None
                        continue
                except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                    trace.note_bad(number, f"the compressed file is damaged from here on ({error})")
                    yield number, None
                    return
                if not line:
                    return
                yield number, line
    except FileNotFoundError:
        raise ReplayError(f"{path}: no such trace; give a JSONL file, plain or .gz") from None
    except OSError as error:
        raise ReplayError(f"{path}: cannot be read: {error.strerror or error}") from None


def _parse(
    decoder: msgspec.json.Decoder[_Line], line: bytes, block_tokens: int, partial: bool
) -> Request | str:
    """A request, or the reason why the line is none ("" = a good line with nothing in it)."""
    try:
        row = decoder.decode(line)
        ids = np.array(row.hash_ids, dtype=np.uint64)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return str(error)
    except OverflowError:
        return "a hash id does not fit into 64 bits"
    count, length = len(ids), row.input_length
    least, most = length // block_tokens, -(-length // block_tokens)
    if not least <= count <= most:
        return (
            f"input_length {length} makes {most} blocks of {block_tokens} tokens, but hash_ids has "
            f"{count}; --block-tokens says how many tokens one hash id stands for"
        )
    last = min(block_tokens, length - block_tokens * (count - 1)) if count else block_tokens
    is_partial = last < block_tokens
    if is_partial and not partial:
        ids, last, is_partial = ids[:-1], block_tokens, False
    return Request(
        timestamp_milliseconds=row.timestamp,
        input_length=length,
        output_length=row.output_length,
        hash_ids=ids,
        last_tokens=last,
        partial_last=is_partial,
        session_id="" if row.session_id is None else str(row.session_id),
    )
