"""Clients of a real LMCache server that die between announcing pages and finishing them.

The client is the one of its server benchmark. It is ended inside its store call: when the server
has given it room for the pages, and before it has written one of them. The server forgets a silent
client after 30 s, the least that it allows.

As a program: `python lmcache_clients.py ask RPC_URL SEQUENCE TOKENS` looks a prompt up.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

SHAPE = "(2,1024,16,8,16):float16:8"
CHUNK_TOKENS = 256
"""Pages of 1 MiB: 2 x 8 layers x 256 tokens x 128 x 2 bytes, with the shape above."""
REAP_SECONDS = 30
WAIT_SECONDS = 240
POOL_GB = 1


def client(url: str, tokens: int) -> Any:
    from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
    from lmcache.cli.commands.bench.server_bench.config import BenchConfig

    made = ServerBenchClient(
        BenchConfig(
            rpc_url=url, http_url="", mode="cpu", transfer_mode="engine_driven", tp_size=1,
            use_mla=False, num_tokens=tokens, kvcache_shape_spec=SHAPE, num_blocks=1024,
            block_size=16,
        ),
        lambda text: print(text, file=sys.stderr),
    )  # fmt: skip
    made.start()
    return made


def die_in_store(url: str, sequence: int, tokens: int) -> None:
    """Never returns."""
    made = client(url, tokens)
    context = made._workers[0].transfer_context._engine_driven_context
    announce = context.prepare_store

    def announce_and_die(*arguments: Any) -> None:
        announce(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    context.prepare_store = announce_and_die
    request = made.create_request(sequence, f"dies-{sequence}", "cold")
    made.store(request, 0, request.num_full_tokens)


def ask(url: str, sequence: int, tokens: int) -> dict[str, Any]:
    """Chunks that a lookup finds, and whether a retrieve of them succeeds."""
    made = client(url, tokens)
    request = made.create_request(sequence, f"asks-{sequence}-{time.monotonic()}", "warm")
    found = made.lookup(request).hit_chunks
    retrieved = None
    if found:
        result = made.retrieve(request, 0, found * CHUNK_TOKENS)
        retrieved = bool(result and result.succeeded)
    made.end_session(request)
    made.close()
    return {"found": found, "retrieved": retrieved}


def kill_clients(times: int, count: int) -> dict[str, Any]:
    """An answer to `Adapter.kill_clients`, on a server of its own."""
    tokens = count * CHUNK_TOKENS
    home = Path(sys.executable).parent
    with tempfile.TemporaryDirectory(prefix="kvc-lm-") as folder:
        port, http, metrics = _free_ports(3)
        url = f"tcp://127.0.0.1:{port}"
        with (Path(folder) / "server.log").open("wb") as log:
            server = subprocess.Popen(
                [
                    *(str(home / "lmcache"), "server", "--host", "127.0.0.1"),
                    *("--port", str(port), "--http-port", str(http)),
                    *("--prometheus-port", str(metrics), "--l1-size-gb", str(POOL_GB)),
                    *("--no-l1-use-lazy", "--eviction-policy", "LRU"),
                    *("--supported-transfer-mode", "auto", "--chunk-size", str(CHUNK_TOKENS)),
                    *("--shm-name", f"kvtier_conf_{os.getpid()}"),
                    *("--worker-reap-timeout-seconds", str(REAP_SECONDS)),
                    *("--worker-registration-grace-seconds", str(REAP_SECONDS)),
                ],
                stdout=log, stderr=log,
            )  # fmt: skip
        try:
            _wait(f"http://127.0.0.1:{http}/healthcheck", server)
            for sequence in range(times):
                _self("die", url, sequence, tokens)
            time.sleep(2 * REAP_SECONDS + 5)
            asked = [json.loads(_self("ask", url, n, tokens)) for n in range(times)]
            status = json.loads(_get(f"http://127.0.0.1:{http}/status"))
        finally:
            server.kill()
            server.wait()
            for left in Path("/dev/shm").glob(f"*kvtier_conf_{os.getpid()}*"):
                left.unlink(missing_ok=True)
    found = sum(answer["found"] for answer in asked)
    retrieved = sum(answer["found"] for answer in asked if answer["retrieved"])
    return {
        "killed": times, "found": retrieved, "free": True,
        "what": f"announced {count} pages each and written none",
        "after": f"when the server had forgotten them, lookups found {found} of"
        f" {times * count} such pages and {retrieved} were handed out as good; server healthy:"
        f" {_health(status)}",
    }  # fmt: skip


def _health(status: dict[str, Any]) -> Any:
    return status.get("is_healthy", status.get("storage_manager", {}).get("is_healthy"))


def _self(what: str, url: str, sequence: int, tokens: int) -> str:
    done = subprocess.run(
        [sys.executable, __file__, what, url, str(sequence), str(tokens)],
        stdout=subprocess.PIPE, text=True, timeout=WAIT_SECONDS,
    )  # fmt: skip
    expected = -signal.SIGKILL if what == "die" else 0
    if done.returncode != expected:
        raise RuntimeError(f"a client that was to {what} ended with {done.returncode}")
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


def _wait(url: str, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            _get(url)
            return
        except OSError:
            if server.poll() is not None or time.monotonic() > end:
                raise RuntimeError("the server did not start") from None
            time.sleep(0.3)


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: str = answer.read().decode()
        return text


def _free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()


if __name__ == "__main__":
    what, url, sequence, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    if what == "die":
        die_in_store(url, sequence, tokens)
    else:
        print(json.dumps(ask(url, sequence, tokens)))
