"""A client of an agent process that stores and loads without a pause, for tests of what happens
around it."""

from __future__ import annotations

import threading

import numpy as np
from agent_process import AgentProcess
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.identity import chain_keys
from kvtier_agent.server.client import AgentError, Client

__all__ = ["GEOMETRY", "Traffic"]

GEOMETRY = Geometry.of_page_bytes(64 * 1024, 256)


class Traffic:
    """Counts what was loaded and what went wrong. Use as a context manager."""

    def __init__(self, agent: AgentProcess) -> None:
        self._client = Client(agent.socket, GEOMETRY, timeout_seconds=5.0, raise_errors=True)
        self._stop = threading.Event()
        self.loads, self.errors, self.wrong = 0, list[str](), 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Traffic:
        assert self._client.wait_connected(20.0)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(20)
        assert not self._thread.is_alive()
        self._client.close()

    def _run(self) -> None:
        client, copy = self._client, np.zeros((4, GEOMETRY.page_bytes), np.uint8)
        turn = 0
        while not self._stop.wait(0.01):
            turn = (turn + 1) % 50
            keys = chain_keys(client.root, np.arange(1024, dtype=np.uint32) + turn * 1024, 256)
            try:
                client.put(keys, np.full_like(copy, turn))
                with client.load(keys) as lease:
                    good = lease.copy_to(copy)
            except AgentError as error:
                self.errors.append(str(error))
                continue
            self.loads += int(good.sum())
            self.wrong += int((copy[good] != turn).sum())
