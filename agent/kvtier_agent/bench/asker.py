"""A client that asks as fast as it can, until it is ended: the load of `lookup`'s second figure.

    python -m kvtier_agent.bench.asker SOCKET PAGES KEYS NUMBER

Asks for KEYS of the stand's PAGES pages at a time, beginning at another place for each NUMBER, and
says `{"ready": true}` when it has its first answer.
"""

from __future__ import annotations

import json
import sys

from kvtier_agent.bench.lookup import GEOMETRY, windows
from kvtier_agent.bench.stand import CALL_SECONDS
from kvtier_agent.server.client import Client


def ask(path: str, pages: int, keys: int, number: int) -> None:
    """Looks up until the process is ended."""
    with Client(
        path, GEOMETRY, timeout_seconds=CALL_SECONDS, name=f"asker-{number}", raise_errors=True
    ) as client:
        if not client.wait_connected(CALL_SECONDS):
            raise SystemExit(client.counters.last_error)
        for i, asked in enumerate(windows(pages, keys, number)):
            client.lookup(asked)
            if not i:
                print(json.dumps({"ready": True}), flush=True)


if __name__ == "__main__":
    ask(sys.argv[1], *(int(word) for word in sys.argv[2:5]))
