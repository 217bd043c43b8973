"""Readiness, shown and not claimed: store a page, load it, compare its bytes, through the socket.

The probe is a client like any other, on every trust domain whose geometry is known. It keeps one
page of its own (its content derived from its key) and goes the whole way again each time: look it
up, store it where it is gone, load it, verify it; and it reserves and gives back one more slot, so
that the way in is tried even while the page stays. A domain that takes no pages now (no policy, no
space) but answers in order is ready; so is one that no engine has told its geometry yet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.identity import child_key_from_digest
from kvtier_agent.cache.results import MISS, PutStatus
from kvtier_agent.server.client import AgentError, Client, Stored
from kvtier_agent.server.snapshot import ServerSnapshot

PROBE_SECONDS: Final = 1.0
_SALT: Final = b"kvtier readiness probe"
_REFUSED: Final = {
    int(Stored.REFUSED_VALUE): "the policy's thresholds refuse it",
    int(Stored.REFUSED_SPACE): "no space is free right now",
    int(Stored.REFUSED_CLOSED): "no policy is in force",
    int(Stored.BUSY): "another probe is at it",
    int(Stored.LOST): "its slot was taken back",
}


class Probe:
    """Answers ``check`` for one agent; holds one client per trust domain."""

    def __init__(self, run_dir: Path, snapshot: Callable[[], ServerSnapshot | None]) -> None:
        self._run_dir = run_dir
        self._snapshot = snapshot
        self._clients: dict[str, Client] = {}
        self._lock = threading.Lock()

    def check(self) -> tuple[bool, list[str]]:
        """Is the agent ready? And a line for each trust domain, for people."""
        snapshot = self._snapshot()
        if snapshot is None:
            return False, ["starting: the cache thread has not run yet"]
        with self._lock:
            answers = [
                self._domain(name, domain.geometry) for name, domain in snapshot.domains.items()
            ]
        return all(ok for ok, _ in answers), [line for _, line in answers]

    def close(self) -> None:
        """Let the clients go."""
        with self._lock:
            for client in self._clients.values():
                client.close()
            self._clients.clear()

    def _domain(self, name: str, geometry: Geometry | None) -> tuple[bool, str]:
        if geometry is None:
            return True, f"{name}: ready, no engine has connected yet"
        try:
            client = self._clients.get(name)
            if client is not None and client.geometry != geometry:
                client.close()  # another model has the domain
                client = None
            if client is None:
                client = self._clients[name] = Client(
                    self._run_dir / f"{name}.sock", geometry, timeout_seconds=PROBE_SECONDS,
                    tenant_salt=_SALT, name="readiness probe", raise_errors=True, probe=True,
                )  # fmt: skip
            client.wait_connected(PROBE_SECONDS)
            return self._round_trip(name, client)
        except AgentError as error:
            return False, f"{name}: {error}"

    def _round_trip(self, name: str, client: Client) -> tuple[bool, str]:
        key = _key(client, b"kept")
        page = _content(key, client.page_bytes)
        self._try_the_way_in(client)
        found = client.lookup(key)
        stored = int(Stored.EXISTS)
        if found.tiers[0] == MISS:
            stored = int(client.put(key, page.reshape(1, -1)).status[0])
        if stored in _REFUSED:
            return True, f"{name}: ready, a page was not stored: {_REFUSED[stored]}"
        out = np.zeros((1, client.page_bytes), np.uint8)
        with client.load(key) as lease:
            tier = int(lease.tier[0])
            good = bool(lease.copy_to(out)[0])
        if tier == MISS:
            return True, f"{name}: ready, the page stored was evicted before it was loaded"
        if not good:
            return False, f"{name}: the page stored does not match its checksum"
        if not np.array_equal(out[0], page):
            return False, f"{name}: the page stored came back with other bytes"
        return True, f"{name}: ready, a page was stored, loaded and verified"

    def _try_the_way_in(self, client: Client) -> None:
        reservation = client.reserve(_key(client, b"tried"))
        if reservation.status[0] == PutStatus.OFFERED:
            reservation.abort()


def _key(client: Client, what: bytes) -> NDArray[np.uint8]:
    digest = blake2b(what, digest_size=32).digest()
    return np.frombuffer(child_key_from_digest(client.root, digest), np.uint8).reshape(1, 16)


def _content(key: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Bytes that follow from the key and differ from place to place."""
    seed = int.from_bytes(key.tobytes()[:8], "little")
    words = np.arange(-(-size // 8), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (words ^ np.uint64(seed)).view(np.uint8)[:size]
