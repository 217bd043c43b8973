"""The stand of a benchmark: an agent of its own with tiers of known sizes, and clients of it.

What a stand starts and makes is gone when it is closed, and also when this process is killed
(`replay.guardian`). Page keys come from a seed, so that two processes can agree on them.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.bench import machine
from kvtier_agent.bench.errors import BenchError
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.replay.driver import new_seed
from kvtier_agent.replay.errors import ReplayError
from kvtier_agent.replay.guardian import GuardianError
from kvtier_agent.replay.own_agent import OwnAgent
from kvtier_agent.server.client import Client
from kvtier_agent.units import human

VOLUME: Final = "data0"
CALL_SECONDS: Final = 10.0
"""Of one call to the agent; a benchmark that waits longer has nothing to measure."""
READY_SECONDS: Final = 300.0
"""How long an agent may take to lay out its tiers."""
PAGE_TOKENS: Final = 256
LEAST_TIER_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of the tiers; `nvme` 0 = none. L0 is the engine's, so there is none here."""

    dram: int
    nvme: int = 0


class Stand:
    """A running agent; use as a context manager. Raises `BenchError`."""

    def __init__(
        self,
        command: Sequence[str],
        sizes: Sizes,
        geometry: Geometry,
        *,
        volume: Path | None = None,
    ) -> None:
        """`command`: the words that start `kvtier agent`; `volume`: the folder for L2."""
        self.geometry = geometry
        self.sizes = sizes
        self._stack = ExitStack()
        try:
            self.agent = self._stack.enter_context(
                OwnAgent(
                    command,
                    policy(sizes),
                    volumes={VOLUME: volume} if sizes.nvme and volume is not None else {},
                    seed=new_seed(),
                    arguments=("--l0", "engine", "--device", "cpu"),
                    purpose="bench",
                )
            )
        except ReplayError as error:
            raise BenchError(str(error)) from None

    def client(self, name: str = "bench") -> Client:
        """A client that raises `AgentError`, connected, of an agent that admits pages. Closed with
        the stand."""
        client = self._stack.enter_context(
            Client(
                self.agent.socket,
                self.geometry,
                timeout_seconds=CALL_SECONDS,
                name=name,
                raise_errors=True,
            )
        )
        end = time.monotonic() + READY_SECONDS
        while not (client.connected and client.stats()["admitting"]):
            gone = self.agent.alive()
            if gone or time.monotonic() > end:
                raise BenchError(
                    gone or f"the agent took no client: {client.counters.last_error or 'no policy'}"
                )
            time.sleep(0.02)
        self._check_sizes(client.stats()["tiers"])
        return client

    def cpu_seconds(self) -> float:
        """Of the agent and of this process, so far."""
        return machine.cpu_seconds(self.agent.pid) + time.process_time()

    def volume_folder(self) -> Path:
        """The run's own folder on the volume."""
        return self.agent.volumes[VOLUME]

    def help_out(self, name: str, argv: Sequence[str]) -> Path:
        """Start another process of the stand, that ends with it; where its words go to."""
        log = self.agent.folder / f"{name}.log"
        self.agent.guardian.start(name, argv, log=log)
        return log

    def end_help(self, name: str) -> None:
        """End another process of the stand; nothing where it was never started."""
        with contextlib.suppress(GuardianError):
            self.agent.guardian.stop(name)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Stand:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_sizes(self, tiers: dict[str, Any]) -> None:
        """An agent clamps tiers to what the machine has: a figure of those would mislead."""
        for tier, wanted in (("dram", self.sizes.dram), ("nvme", self.sizes.nvme)):
            has = tiers[tier]["capacity_bytes"]
            if has < wanted * 0.9:
                where = "shared memory" if tier == "dram" else "the volume"
                raise BenchError(
                    f"the {tier} tier got {human(has)} of {human(wanted)}: make room in {where}, "
                    "or measure with fewer pages"
                )


def policy(sizes: Sizes) -> dict[str, Any]:
    """The policy of a stand: everything is admitted, nothing cools down."""
    tiers: dict[str, Any] = {
        "hbm": {"size": "1Mi"},  # the engine's own pool is L0: nothing is made of it
        "dram": {"size": str(max(sizes.dram, LEAST_TIER_BYTES))},
    }
    if sizes.nvme:
        tiers["nvme"] = {"size": str(sizes.nvme), "volumes": [VOLUME], "reservePercent": 1}
    return {
        "apiVersion": "kvtier.io/v1alpha1",
        "kind": "KVTierPolicy",
        "metadata": {"name": "bench"},
        "spec": {
            "tiers": tiers,
            "valueDensity": {"model": "classic"},
            "replacement": {"coolDownSeconds": 0},
        },
    }


def random_keys(seed: Sequence[int], pages: int) -> NDArray[np.uint8]:
    """(pages, 16) uint8, the same for the same seed in every process."""
    return np.random.default_rng(list(seed)).integers(0, 256, (pages, 16), dtype=np.uint8)


def touched(pages: int, page_bytes: int) -> NDArray[np.uint8]:
    """(pages, page_bytes) random bytes in memory that was written to."""
    return np.random.default_rng(0).integers(0, 256, (pages, page_bytes), dtype=np.uint8)


def put_all(client: Client, keys: NDArray[np.uint8], data: NDArray[np.uint8]) -> None:
    """Store pages that have to fit. Raises `BenchError`."""
    stored = client.put(keys, data).stored
    if stored != len(keys):
        raise BenchError(f"{len(keys) - stored} of {len(keys)} pages were not taken")


def parse_last_line(log: Path) -> dict[str, Any] | None:
    """The JSON object in the last line of a helper's words; None where there is none yet."""
    try:
        found = json.loads(log.read_text().strip().splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return None
    return found if isinstance(found, dict) else None
