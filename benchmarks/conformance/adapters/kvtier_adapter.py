"""kvtier: a whole agent in this process (so that a loop can be killed) and a client beside it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
from common import PAGE_BYTES, PATIENCE_SECONDS, Adapter, content, digest, serve, sort_out
from kvtier_agent import logs
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.results import MISS
from kvtier_agent.node.main import Agent
from kvtier_agent.server.client import Client, Stored
from kvtier_agent.settings import AgentSettings
from kvtier_cli.options import read_settings

GEOMETRY = Geometry.of_page_bytes(PAGE_BYTES, 256, weights="conformance")
CALL_SECONDS = 20.0
HOLD = """
import sys, time
import numpy as np
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.server.client import Client
client = Client(sys.argv[1], Geometry.of_page_bytes(1 << 20, 256, weights="conformance"))
assert client.wait_connected(30)
keys = np.frombuffer(bytes.fromhex(sys.argv[2]), np.uint8).reshape(-1, 16)
held = client.reserve(keys)
held.write_rows(memoryview(np.full(len(held.offered) << 20, 7, np.uint8)[: 1 << 19]))
print(len(held.offered), flush=True)
time.sleep(600)
"""


def keys_of(numbers: list[int]) -> np.ndarray:
    return np.frombuffer(b"".join(digest(n)[:16] for n in numbers), np.uint8).reshape(-1, 16)


class Kvtier(Adapter):
    """Memory stays over a restart, as it does by default."""

    def open(self, folder: Path, memory: Path, dram_pages: int, disk_pages: int) -> dict[str, Any]:
        volume, run = folder / "data0", folder / "run"
        volume.mkdir(parents=True, exist_ok=True)
        run.mkdir(exist_ok=True)
        policy = folder / "policy.yaml"
        policy.write_text(
            "apiVersion: kvtier.io/v1alpha1\nkind: KVTierPolicy\nmetadata: {name: conformance}\n"
            "spec:\n  tiers:\n    hbm: {size: 1Mi}\n"
            f"    dram: {{size: {dram_pages * PAGE_BYTES}}}\n"
            f"    nvme: {{size: {disk_pages * PAGE_BYTES}, volumes: [data0], reservePercent: 0}}\n"
            "  valueDensity: {model: classic}\n"
        )
        logs.configure("error", "text")
        self.agent = Agent(
            read_settings(
                AgentSettings,
                {
                    "policy": policy, "run_dir": run, "state_dir": folder / "state",
                    "shm_dir": memory, "volume": [f"data0={volume}"], "device": "cpu",
                    "allow_root_filesystem": True, "l0": "engine", "http": "127.0.0.1:0",
                },
            )
        )  # fmt: skip
        self.agent.start()
        self.socket = run / "default.sock"
        self.client = Client(self.socket, GEOMETRY, timeout_seconds=CALL_SECONDS, raise_errors=True)
        assert self.client.wait_connected(60)
        return {}

    def put(self, first: int, count: int) -> dict[str, Any]:
        stored = []
        for number in range(first, first + count):
            page = content(number).reshape(1, -1)
            end = time.monotonic() + PATIENCE_SECONDS
            while True:
                status = self.client.put(keys_of([number]), page).status[0]
                if status in (Stored.STORED, Stored.EXISTS):
                    stored.append(number)
                    break
                if time.monotonic() > end:
                    break
                time.sleep(0.02)
        return {"stored": stored}

    def get(self, numbers: list[int]) -> dict[str, Any]:
        out = np.zeros((1, PAGE_BYTES), np.uint8)

        def read(number: int) -> bytes | None:
            with self.client.load(keys_of([number]), deadline_milliseconds=10_000) as lease:
                if lease.tier[0] == MISS or not lease.copy_to(out)[0]:
                    return None
                return out[0].tobytes()

        return sort_out(read, numbers)

    def settle(self) -> dict[str, Any]:
        while True:
            stats = self.client.stats()
            moving = sum(tier["moving_pages"] for tier in stats["tiers"].values())
            if not moving and not stats["write_queue_bytes"] and not stats["reservations"]:
                return {}
            time.sleep(0.05)

    def kill_eviction(self) -> dict[str, Any]:
        # The cache thread decides what goes; the movers carry it out.
        names = [n for n in self.agent.supervisor.names() if n.split("-")[0] in ("cache", "mover")]
        for name in names:
            self.agent.supervisor.kill(name)
        return {"what": f"the loops {', '.join(names)} were killed at their next beat"}

    def health(self) -> dict[str, Any]:
        assert self.agent.http is not None
        url = f"http://127.0.0.1:{self.agent.http.address[1]}/healthz"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return {"healthy": True, "says": answer.read().decode().strip()}
        except urllib.error.HTTPError as error:
            return {"healthy": False, "says": error.read().decode().strip().replace("\n", "; ")}

    def kill_clients(self, times: int, first: int, count: int) -> dict[str, Any]:
        numbers = list(range(first, first + count))
        held = 0
        for _ in range(times):
            client = subprocess.Popen(
                [sys.executable, "-c", HOLD, str(self.socket), keys_of(numbers).tobytes().hex()],
                stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            assert client.stdout is not None
            held += int(client.stdout.readline() or 0)
            client.send_signal(signal.SIGKILL)
            client.wait()
            while self.client.stats()["reservations"]:
                time.sleep(0.02)
        found = self.get(numbers)
        return {
            "killed": times, "held": held, "found": len(found["right"] + found["wrong"]),
            "what": "reserved pages and filled half of one",
        }  # fmt: skip

    def close(self) -> dict[str, Any]:
        self.client.close()
        self.agent.stop()
        return {}


if __name__ == "__main__":
    os.umask(0o077)
    serve(Kvtier())
