"""An agent and an engine, both real: run from the environment that holds the vLLM CPU build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# One thread, bound to no core: on a shared machine two that wait for each other by spinning take
# minutes, and one adds up in the same order every time.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")

BLOCK_TOKENS = 32
PAGE_TOKENS = 64
LORA_RANK = 8

POLICY = """\
apiVersion: kvtier.io/v1alpha1
kind: KVTierPolicy
metadata: {name: engine-test}
spec:
  tiers:
    hbm: {size: 64Mi}
    dram: {size: 512Mi}
  page: {tokens: 64, transferSize: 1Mi}
  valueDensity: {model: classic}
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@dataclass
class Agent:
    """One agent process; `socket` is where engines find it."""

    folder: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        return self.folder / "run" / "default.sock"

    def start(self) -> None:
        command = [
            sys.executable, "-m", "kvtier_cli.main", "agent",
            "--policy", str(self.folder / "policy.yaml"),
            "--run-dir", str(self.folder / "run"),
            "--state-dir", str(self.folder / "state"),
            "--shm-dir", str(self.folder / "shm"),
            "--l0", "engine",
            "--http", "127.0.0.1:0",
        ]  # fmt: skip
        log = (self.folder / "agent.log").open("ab")
        self.process = subprocess.Popen(command, stdout=log, stderr=log)
        end = time.monotonic() + 30
        while not self.socket.exists():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError((self.folder / "agent.log").read_text()[-2000:])
            time.sleep(0.05)

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(20)
            self.process = None


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    folder = tmp_path_factory.mktemp("agent")
    for left in Path("/dev/shm").glob("kvtier-vllm-test-*"):
        if not Path("/proc", left.name.rpartition("-")[2]).exists():
            shutil.rmtree(left, ignore_errors=True)  # of a run that was killed
    shm = Path("/dev/shm") / f"kvtier-vllm-test-{os.getpid()}"
    shm.mkdir()
    (folder / "shm").symlink_to(shm)
    (folder / "policy.yaml").write_text(POLICY)
    made = Agent(folder)
    made.start()
    yield made
    made.stop()
    shutil.rmtree(shm)


@pytest.fixture(scope="session")
def model_folder() -> Path:
    import smollm2

    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return smollm2.convert(cache / "kvtier" / "models" / "smollm2-135m")


@pytest.fixture(scope="module")
def engine(agent: Agent, model_folder: Path) -> Iterator[Any]:
    """A vLLM engine whose only change against the default is the connector."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    made = LLM(
        model=str(model_folder),
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=4,
        block_size=BLOCK_TOKENS,
        enable_prefix_caching=True,
        enforce_eager=True,
        enable_lora=True,
        max_lora_rank=LORA_RANK,
        seed=0,
        kv_transfer_config=KVTransferConfig(
            kv_connector="KvtierConnector",
            kv_connector_module_path="kvtier_agent.connectors.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "kvtier.socket": str(agent.socket),
                "kvtier.page_tokens": PAGE_TOKENS,
                "kvtier.group_mebibytes": 3,  # two pages, so that every prefix takes several
                "kvtier.timeout_milliseconds": 20_000,  # a busy machine is no miss
                "kvtier.load_timeout_milliseconds": 20_000,
                "kvtier.step_timeout_milliseconds": 60_000,
            },
        ),
    )
    yield made
    made.llm_engine.engine_core.shutdown()
