"""A generator of multi-turn agent and chat sessions, for demos, examples and tests.

It makes the kind of traffic a tiered cache exists for: many conversations that grow turn by turn,
share a few system prompts, pause for seconds (a tool runs) or minutes (a person thinks), and come
back asking for everything they said before. Seeded: the same settings give the same requests.

How a session goes:

- Sessions begin as a Poisson process, `sessions_per_second` on average.
- A share `agent_share` are agents, the others chats. Each takes one of `system_prompts` system
  prompts, the k-th most popular with weight 1 / k (Zipf). A system prompt's length is log-normal
  with median `system_tokens` (agents: twice that, for tool descriptions), the same for all who
  share it.
- A chat turn adds a message of the user: log-normal, median 120 tokens, sigma 1.0. Then a think
  time of `think_seconds` at the median (log-normal, sigma 1.0) before the next turn. The
  number of turns is geometric with mean `chat_turns`.
- An agent's turn is a loop: the task (log-normal, median 300 tokens), then tool results
  (log-normal, median 900 tokens, sigma 1.2; files and command output are long-tailed), each after
  a tool time of `tool_seconds` at the median (log-normal, sigma 0.8). The number of results is
  geometric with mean `tool_calls`; then the person thinks, as above. The number of tasks is
  geometric with mean `agent_tasks`.
- Every answer is log-normal, median 180 tokens, sigma 0.8, and becomes part of the next prompt.
- A session that reaches `max_tokens` ends.

Times are trace time. A block's id stands for its content: blocks that lie wholly within a
system prompt are shared by all sessions that use it, a block that fills up later gets a new id.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvtier_agent.replay.trace import BLOCK_TOKENS, Request, write_trace


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """What the traffic looks like; units are in the names, distributions in the module's text."""

    seed: int = 1
    sessions_per_second: float = 0.5
    agent_share: float = 0.5
    system_prompts: int = 8
    system_tokens: int = 2000
    chat_turns: float = 6.0
    agent_tasks: float = 2.0
    tool_calls: float = 8.0
    think_seconds: float = 30.0
    tool_seconds: float = 2.0
    max_tokens: int = 120_000
    block_tokens: int = BLOCK_TOKENS


@dataclass(slots=True)
class _Session:
    number: int
    agent: bool
    system: int
    system_tokens: int
    tokens: int
    turns_left: int
    tools_left: int = 0
    ids: list[int] = field(default_factory=list)
    filled: int = 0


class SessionTraffic:
    """Endless traffic; `requests()` yields it in order of time."""

    def __init__(self, settings: SessionSettings) -> None:
        self.settings = settings
        # Not cryptography: the point of the seed is that everybody gets the same traffic.
        self._random = random.Random(settings.seed)  # noqa: S311
        self._ids = itertools.count(1)
        self._system_lengths = [
            self._log_normal(settings.system_tokens, 0.5) for _ in range(settings.system_prompts)
        ]
        self._system_ids: dict[tuple[bool, int, int], int] = {}
        self._weights = [1 / (rank + 1) for rank in range(settings.system_prompts)]

    def requests(
        self, *, count: int | None = None, seconds: float | None = None
    ) -> Iterator[Request]:
        """Requests until `count` of them or `seconds` of trace time, whichever comes first."""
        due: list[tuple[float, int, _Session]] = []
        numbers = itertools.count()
        next_session = 0.0
        made = 0
        while count is None or made < count:
            if not due or next_session <= due[0][0]:
                heapq.heappush(due, (next_session, next(numbers), self._begin(next(numbers))))
                next_session += self._random.expovariate(self.settings.sessions_per_second)
                continue
            now, _, session = heapq.heappop(due)
            if seconds is not None and now >= seconds:
                return
            pause, request = self._turn(session, now)
            yield request
            made += 1
            if pause is not None:
                heapq.heappush(due, (now + pause, next(numbers), session))

    def _begin(self, number: int) -> _Session:
        settings = self.settings
        agent = self._random.random() < settings.agent_share
        system = self._random.choices(range(settings.system_prompts), self._weights)[0]
        length = self._system_lengths[system] * (2 if agent else 1)
        mean = settings.agent_tasks if agent else settings.chat_turns
        return _Session(number, agent, system, length, length, self._geometric(mean))

    def _turn(self, session: _Session, now: float) -> tuple[float | None, Request]:
        """One request of the session at `now`, and the pause after it (None = it has ended)."""
        settings = self.settings
        in_loop = session.tools_left > 0
        if in_loop:
            session.tools_left -= 1
            session.tokens += self._log_normal(900, 1.2)
        else:
            session.turns_left -= 1
            session.tokens += self._log_normal(300 if session.agent else 120, 1.0)
            if session.agent:
                session.tools_left = self._geometric(settings.tool_calls)
        session.tokens = min(session.tokens, settings.max_tokens)
        output = self._log_normal(180, 0.8)
        request = self._request(session, now, output)
        full = session.tokens >= settings.max_tokens
        session.tokens += output
        if session.tools_left and not full:
            return self._pause(settings.tool_seconds, 0.8), request
        if session.turns_left > 0 and not full:
            return self._pause(settings.think_seconds, 1.0), request
        return None, request

    def _request(self, session: _Session, now: float, output: int) -> Request:
        block = self.settings.block_tokens
        count = -(-session.tokens // block)
        last = session.tokens - block * (count - 1)
        # Blocks that were full before keep their ids; from the first changed one on they are new.
        del session.ids[session.filled :]
        for index in range(len(session.ids), count):
            within = (index + 1) * block <= session.system_tokens
            session.ids.append(self._system_id(session, index) if within else next(self._ids))
        session.filled = session.tokens // block
        return Request(
            timestamp_milliseconds=round(now * 1000),
            input_length=session.tokens,
            output_length=output,
            hash_ids=np.array(session.ids, dtype=np.uint64),
            last_tokens=last,
            partial_last=last < block,
            session_id=f"{'agent' if session.agent else 'chat'}-{session.number}",
        )

    def _system_id(self, session: _Session, index: int) -> int:
        key = (session.agent, session.system, index)
        if key not in self._system_ids:
            self._system_ids[key] = next(self._ids)
        return self._system_ids[key]

    def _log_normal(self, median: float, sigma: float) -> int:
        return max(1, round(self._random.lognormvariate(math.log(median), sigma)))

    def _geometric(self, mean: float) -> int:
        """At least 1, with this mean."""
        if mean <= 1:
            return 1
        return 1 + math.floor(math.log(1 - self._random.random()) / math.log(1 - 1 / mean))

    def _pause(self, median: float, sigma: float) -> float:
        return self._random.lognormvariate(math.log(median), sigma)


def main() -> None:
    """Write generated traffic as a trace: `python -m kvtier_agent.replay.sessions --help`."""
    parser = argparse.ArgumentParser(
        prog="python -m kvtier_agent.replay.sessions",
        description="Write a trace of multi-turn agent and chat sessions (Mooncake's JSONL form).",
    )
    parser.add_argument("out", type=Path, help="file to write; compressed when it ends in .gz")
    parser.add_argument("--requests", type=int, default=2000, help="how many (default: 2000)")
    parser.add_argument("--seed", type=int, default=1, help="(default: 1)")
    parser.add_argument(
        "--sessions-per-second", type=float, default=0.5, help="arrivals (default: 0.5)"
    )
    options = parser.parse_args()
    settings = SessionSettings(seed=options.seed, sessions_per_second=options.sessions_per_second)
    count = write_trace(options.out, SessionTraffic(settings).requests(count=options.requests))
    print(f"{options.out}: {count} requests")


if __name__ == "__main__":
    main()
