"""An agent for tests: core, cache thread and HTTP under a supervisor, budgets given by hand.

In a test's own process: ``SmallAgent(...)``. As a process of its own (to be killed, or to be
attacked): ``python small_agent.py JSON``, with ``throttle`` (bytes a second of its drive) besides;
it prints one JSON line when it serves.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import structlog
from kvtier_agent.cache.settings import Behaviour, Budgets, CacheSettings
from kvtier_agent.node.signals import Signals
from kvtier_agent.server.http import HttpServer
from kvtier_agent.server.loop import CacheLoop
from kvtier_agent.server.rundir import table_path
from kvtier_agent.server.settings import ServerSettings, TrustDomain
from kvtier_agent.storage.core import Core, CoreSettings
from kvtier_agent.storage.fileio import FileIO
from kvtier_agent.supervise import Supervisor

MIB = 1 << 20
SHM = Path("/dev/shm")


def sweep(folder: Path) -> None:
    """Remove what agents on `folder` left in shared memory."""
    for left in SHM.glob(f"kvtier-test-*-{folder.name}-*"):
        shutil.rmtree(left, ignore_errors=True)


class SmallAgent:
    """Serves from the constructor on; ``close`` ends it. ``folder`` holds everything."""

    def __init__(
        self,
        folder: Path,
        *,
        l0: int = 2 * MIB,
        l1: int = 8 * MIB,
        l2: int = 64 * MIB,
        lease_seconds: float = 30.0,
        domains: dict[str, int | None] | None = None,
        admitting: bool = True,
        cool_down_seconds: float = 0.0,
        server: dict[str, Any] | None = None,
        core: dict[str, Any] | None = None,
        cache: dict[str, Any] | None = None,
        io: FileIO | None = None,
    ) -> None:
        """`server`, `core`, `cache`: further fields of their settings. `io`: of the volumes."""
        self.folder = folder
        self.run_dir = folder / "run"
        self.behaviour = Behaviour(admitting=admitting, cool_down_seconds=cool_down_seconds)
        self.budgets = Budgets(l0, l1, l2, ("data0",) if l2 else (), reserve_percent=0)
        self.supervisor = Supervisor(recover_seconds=0.05)
        self.http = HttpServer("127.0.0.1", 0, self.supervisor)
        self.supervisor.start("http", self.http.run)
        self.loop = CacheLoop(
            ServerSettings(self.run_dir, lease_seconds=lease_seconds, **(server or {}))
        )
        self.cache_settings = CacheSettings(lease_seconds=lease_seconds, **(cache or {}))
        self.cores: dict[str, Core] = {}
        self._core_settings = core or {}
        self._io = io
        self.run_dir.mkdir(parents=True, exist_ok=True)
        for name, gid in (domains or {"default": None}).items():
            self.cores[name] = self._core(name, gid)
            self.loop.add(TrustDomain(name, self.cores[name], gid))
        self.loop.open()
        self.supervisor.start("cache", self.loop.run, wake=self.loop.wake)
        self.http.attach(lambda: self.loop.snapshot, self.run_dir)
        self.call(lambda: None, 30)
        while self.loop.snapshot is None:
            time.sleep(0.001)

    @property
    def core(self) -> Core:
        return next(iter(self.cores.values()))

    def socket(self, domain: str = "default") -> Path:
        return self.run_dir / f"{domain}.sock"

    def call(self, function: Any, seconds: float = 5.0) -> Any:
        """Run on the cache thread."""
        return self.loop.post(function).result(seconds)

    def close(self) -> None:
        self.supervisor.stop(5)
        self.loop.close()
        for core in self.cores.values():
            core.close()
        self.http.close()

    def _core(self, name: str, gid: int | None) -> Core:
        volume = self.folder / f"volume-{name}"
        volume.mkdir(exist_ok=True)
        shm = SHM / f"kvtier-test-{os.getpid()}-{self.folder.name}-{name}"
        shm.mkdir(exist_ok=True)
        core = Core(
            CoreSettings(
                domain=name,
                arena_folder=shm,
                table_path=table_path(self.run_dir, name),
                volumes={"data0": volume},
                maximum_l0_bytes=max(self.budgets.l0_bytes, MIB),
                maximum_l1_bytes=max(self.budgets.l1_bytes, MIB),
                gid=gid,
                allow_root_filesystem=True,
                cache=self.cache_settings,
                **self._core_settings,
            ),
            io=self._io,
            wake=self.loop.wake,
            start=self.supervisor.start,
        )
        core.reconfigure(time.monotonic(), self.behaviour, self.budgets)
        return core


def main() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    settings = json.loads(sys.argv[1])
    folder = Path(settings.pop("folder"))
    throttle = settings.pop("throttle", None)
    if throttle:
        from storm.throttle import throttled

        settings["io"] = throttled(throttle)
    agent = SmallAgent(folder, **settings)
    signals = Signals((signal.SIGTERM,))
    print(json.dumps({"pid": os.getpid(), "port": agent.http.address[1]}), flush=True)
    signals.wait()
    agent.close()


if __name__ == "__main__":
    main()
