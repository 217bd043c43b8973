"""Readiness, shown and not claimed: store a page, load it, compare its bytes, through the socket.

The probe is a client like any other, on every trust domain whose geometry is known. It keeps one
page of its own (its content derived from its key) and goes the whole way again each time: look it
up, store it where it is gone, load it, verify it; and it reserves and gives back one more slot, so
that the way in is tried even while the page stays. A domain that takes no pages now (no policy, no
space) but answers in order is ready; so is one that no engine has told its geometry yet.

All this happens in the agent's own memory, so no more than one copy of a page is ever held, and of
pages beyond `MOST_BYTES` only the way in is tried.
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
MOST_BYTES: Final = 256 << 20
"""Largest page that is stored and loaded, an eighth of the agent's own memory."""
_BLOCK_BYTES: Final = 1 << 20
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
        except (AgentError, ValueError, MemoryError) as error:
            return False, f"{name}: {str(error) or type(error).__name__}"

    def _round_trip(self, name: str, client: Client) -> tuple[bool, str]:
        key, size = _key(client, b"kept"), client.page_bytes
        self._try_the_way_in(client)
        if size > MOST_BYTES:
            return True, f"{name}: ready, pages of {size >> 20} MiB are too large to be tried"
        found = client.lookup(key)
        stored = int(Stored.EXISTS)
        if found.tiers[0] == MISS:
            stored = int(client.put(key, _page(key, size)).status[0])
        if stored in _REFUSED:
            return True, f"{name}: ready, a page was not stored: {_REFUSED[stored]}"
        out = np.zeros((1, size), np.uint8)
        with client.load(key) as lease:
            tier = int(lease.tier[0])
            good = bool(lease.copy_to(out)[0])
        if tier == MISS:
            return True, f"{name}: ready, the page stored was evicted before it was loaded"
        if not good:
            return False, f"{name}: the page stored does not match its checksum"
        if not _is_content(key, out[0]):
            return False, f"{name}: the page stored came back with other bytes"
        return True, f"{name}: ready, a page was stored, loaded and verified"

    def _try_the_way_in(self, client: Client) -> None:
        reservation = client.reserve(_key(client, b"tried"))
        if reservation.status[0] == PutStatus.OFFERED:
            reservation.abort()


def _key(client: Client, what: bytes) -> NDArray[np.uint8]:
    digest = blake2b(what, digest_size=32).digest()
    return np.frombuffer(child_key_from_digest(client.root, digest), np.uint8).reshape(1, 16)


def _page(key: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """The page of a key, (1, size)."""
    page = np.empty((1, size), np.uint8)
    for start in range(0, size, _BLOCK_BYTES):
        block = page[0, start : start + _BLOCK_BYTES]
        block[:] = _content(key, start, len(block))
    return page


def _is_content(key: NDArray[np.uint8], page: NDArray[np.uint8]) -> bool:
    blocks = (
        (start, page[start : start + _BLOCK_BYTES]) for start in range(0, len(page), _BLOCK_BYTES)
    )
    return all(np.array_equal(block, _content(key, start, len(block))) for start, block in blocks)


def _content(key: NDArray[np.uint8], start: int, size: int) -> NDArray[np.uint8]:
    """Bytes that follow from the key and differ from place to place: those of a block that begins
    at a multiple of 8."""
    seed = int.from_bytes(key.tobytes()[:8], "little")
    words = np.arange(start // 8, -(-(start + size) // 8), dtype=np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words ^= np.uint64(seed)
    return words.view(np.uint8)[:size]
