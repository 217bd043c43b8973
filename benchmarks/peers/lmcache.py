"""LMCache's multi-process server and its own benchmark client, beside kvtier on one machine.

The server is pinned to the release below, keeps its DRAM pool allocated from the start, and runs
with OMP_NUM_THREADS=1, without which its lookups are many times slower. Before anything is timed
a pass writes more than half the pool, so that its memory was touched. Its client hashes tokens,
looks up, stores and retrieves; it compares what came back, but the server keeps no checksum.
"""

from __future__ import annotations

import json
import os
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from environment import PeerError, ensure
from kvtier_agent.replay.guardian import Guardian

VERSION = "0.5.6"
PACKAGES = ("torch==2.13.0", f"lmcache=={VERSION}")
CHUNK_TOKENS = 256
POOL_GB = 2
START_SECONDS = 180.0
RUN_SECONDS = 300.0
TOUCH_BYTES = 1_300_000_000
"""Of the first-touch pass: below the water mark at which the server begins to evict."""
BLOCK_TOKENS = 16


class LMCache:
    """A server; use as a context manager. Raises `PeerError`."""

    def __init__(self, run: Path) -> None:
        """`run`: a folder that is made, and removed at the end."""
        self._bin = ensure(f"lmcache-{VERSION}", PACKAGES, "lmcache")
        self._run = run
        self._guardian = Guardian([run])
        self._log = run / "server.log"
        self._environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_LOG_LEVEL": "WARNING",
            "PATH": f"{self._bin}:{os.environ.get('PATH', '')}",
        }
        self._port, self._http, metrics = _free_ports(3)
        words = [
            *(str(self._bin / "lmcache"), "server", "--host", "127.0.0.1"),
            *("--port", str(self._port), "--http-port", str(self._http)),
            *("--prometheus-port", str(metrics), "--l1-size-gb", str(POOL_GB)),
            *("--no-l1-use-lazy", "--eviction-policy", "LRU", "--supported-transfer-mode", "auto"),
            *("--shm-name", f"kvtier_peer_{os.getpid()}", "--chunk-size", str(CHUNK_TOKENS)),
        ]
        try:
            self._guardian.start("server", words, log=self._log, env=self._environment)
            self._wait()
        except BaseException:
            self._guardian.close()
            raise

    def touch(self, page_bytes: int, pages: int) -> None:
        """The first-touch pass."""
        requests = -(-TOUCH_BYTES // (page_bytes * pages))
        self.measure(page_bytes, pages, first=1_000_000, requests=requests)

    def measure(
        self, page_bytes: int, pages: int, *, first: int, requests: int
    ) -> dict[str, float]:
        """Medians over `requests` new prompts of `pages` pages: `store` and `retrieve` in GB/s,
        `lookup` in seconds, of prompts that are there."""
        tokens = pages * CHUNK_TOKENS
        answer = self._run / f"answer-{first}.json"
        shape = f"(2,{tokens // BLOCK_TOKENS + 64},{BLOCK_TOKENS},{_heads(page_bytes)}):float16:1"
        words = [
            *(str(self._bin / "lmcache"), "bench", "server"),
            *("--rpc-url", f"tcp://localhost:{self._port}"),
            *("--url", f"http://localhost:{self._http}", "--mode", "cpu"),
            *("--transfer-mode", "engine_driven", "--num-tokens", str(tokens)),
            *("--kvcache-shape-spec", shape, "--interval", "0"),
            *("--start", str(first), "--end", str(first + requests)),
            *("--format", "json", "--output", str(answer)),
        ]
        log = self._run / f"client-{first}.log"
        self._guardian.start(f"client-{first}", words, log=log, env=self._environment)
        end = time.monotonic() + RUN_SECONDS
        while self._guardian.poll(f"client-{first}") is None:
            if time.monotonic() > end:
                raise PeerError(f"LMCache's client did not end within {RUN_SECONDS:g} s")
            time.sleep(0.05)
        return _read(answer, log, page_bytes * pages)

    def close(self) -> None:
        self._guardian.close()
        # The server leaves its pool behind when it is ended.
        for left in Path("/dev/shm").glob(f"*kvtier_peer_{os.getpid()}*"):
            left.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _wait(self) -> None:
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                url = f"http://127.0.0.1:{self._http}/healthcheck"
                with urllib.request.urlopen(url, timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                pass
            if self._guardian.poll("server") is not None or time.monotonic() > end:
                words = self._log.read_text(errors="replace").strip().splitlines() or ["nothing"]
                raise PeerError(f"LMCache's server did not start; it said: {words[-1][:300]}")
            time.sleep(0.2)


def _heads(page_bytes: int) -> str:
    """KV heads and head size of one fp16 layer whose chunks are `page_bytes` long."""
    elements = page_bytes // (2 * 2 * CHUNK_TOKENS)
    if elements < 8 or page_bytes % (2 * 2 * CHUNK_TOKENS) or elements % 8:
        raise PeerError(f"pages of {page_bytes} bytes: give a multiple of {32 * CHUNK_TOKENS}")
    return f"{elements // 8},8"


def _read(answer: Path, log: Path, size: int) -> dict[str, float]:
    try:
        metrics: dict[str, Any] = json.loads(answer.read_text())["metrics"]
        results = metrics["results"]
        if results["checksum_ok"] != results["total_requests"]:
            raise PeerError(f"LMCache brought back other bytes than were stored: {results}")
        return {
            "store": size / 1e6 / metrics["cold_store"]["cold_store_p50"],
            "retrieve": size / 1e6 / metrics["warm_retrieve"]["warm_retrieve_p50"],
            "lookup": metrics["warm_lookup"]["warm_lookup_p50"] / 1e3,
        }
    except (OSError, ValueError, KeyError, ZeroDivisionError):
        words = log.read_text(errors="replace").strip().splitlines() or ["nothing"]
        raise PeerError(f"LMCache's client gave no figures; it said: {words[-1][:300]}") from None


def _free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()
