"""What the connector sees of vLLM, for tests where vLLM is not installed.

`install` puts stand-ins of the few modules that the connector imports in place; `FakeEngine` drives
both halves of a connector through whole requests in vLLM's order, with KV whose bytes follow from
tokens, weights and adapter, so that a stale page shows. tests/vllm asks the real one.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

BLOCK_TOKENS = 4
PAGE_TOKENS = 8
LAYERS = ("layer.0", "layer.1")
HEADS, HEAD_SIZE = 2, 16
BLOCKS = 64
BLOCK_BYTES = 2 * BLOCK_TOKENS * HEADS * HEAD_SIZE * 2
PAGE_BYTES = BLOCK_BYTES * (PAGE_TOKENS // BLOCK_TOKENS) * len(LAYERS)


@dataclass(frozen=True)
class FullAttentionSpec:
    block_size: int = BLOCK_TOKENS
    num_kv_heads: int = HEADS
    head_size: int = HEAD_SIZE
    dtype: torch.dtype = torch.bfloat16
    non_causal: bool = False

    @property
    def page_size_bytes(self) -> int:
        return 2 * self.block_size * self.num_kv_heads * self.head_size * self.dtype.itemsize


@dataclass(frozen=True)
class SlidingWindowSpec(FullAttentionSpec):
    sliding_window: int = 16


@dataclass(frozen=True)
class MambaSpec:
    block_size: int = BLOCK_TOKENS
    page_size_bytes: int = 64


class Role(Enum):
    SCHEDULER = 0
    WORKER = 1


class Metadata:
    pass


class Connector:
    def __init__(self, vllm_config: Any, role: Role, kv_cache_config: Any) -> None:
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._metadata: Any = None

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._metadata = metadata

    def _get_connector_metadata(self) -> Any:
        return self._metadata


def install(patch: Any) -> Any:
    """The connector's module, on top of the stand-ins. `patch`: pytest's monkeypatch."""
    modules: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.32.0"},
        "vllm.v1": {},
        "vllm.v1.kv_cache_interface": {"FullAttentionSpec": FullAttentionSpec},
        "vllm.distributed": {},
        "vllm.distributed.kv_transfer": {},
        "vllm.distributed.kv_transfer.kv_connector": {},
        "vllm.distributed.kv_transfer.kv_connector.v1": {},
        "vllm.distributed.kv_transfer.kv_connector.v1.base": {
            "KVConnectorBase_V1": Connector,
            "KVConnectorMetadata": Metadata,
            "KVConnectorRole": Role,
        },
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        module.__dict__.update(contents)
        patch.setitem(sys.modules, name, module)
    ours = "kvtier_agent.connectors.vllm.connector"
    sys.modules.pop(ours, None)
    made = importlib.import_module(ours)
    del sys.modules[ours]
    return made


def vllm_config(*, socket: Path | str = "/nowhere.sock", policy: str = "recompute", **extra: Any):
    """`extra`: keys of kvtier without their `kvtier.`"""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=1),
        model_config=SimpleNamespace(model="org/model", revision=None, quantization=None),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        load_config=SimpleNamespace(load_format="auto"),
        device_config=SimpleNamespace(device_type="cpu"),
        attention_config=SimpleNamespace(backend=None),
        kv_transfer_config=SimpleNamespace(
            kv_load_failure_policy=policy,
            kv_connector_extra_config={
                "kvtier.socket": str(socket),
                "kvtier.page_tokens": PAGE_TOKENS,
                **{f"kvtier.{name}": value for name, value in extra.items()},
            },
        ),
    )


def kv_cache_config(spec: Any = None) -> SimpleNamespace:
    group = SimpleNamespace(kv_cache_spec=spec or FullAttentionSpec(), layer_names=list(LAYERS))
    return SimpleNamespace(
        kv_cache_groups=[group], hash_block_size=None, kv_cache_layout=None, num_blocks=BLOCKS
    )


def adapter(name: str, number: int, path: Path | str, **more: Any) -> SimpleNamespace:
    """A `LoRARequest`."""
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(path), **more)


@dataclass
class Answer:
    """Of one request: tokens that came from the tiers, of them blocks with other bytes than they
    would have been computed to, and what failed to load."""

    cached: int
    stale: int
    bad: set[int]
    tokens_per_second: float | None = None


@dataclass
class FakeEngine:
    """One engine without a prefix cache of its own but for what a test says (`local`)."""

    module: Any
    config: Any
    weights: str = "w"
    forward: Callable[[], None] = lambda: None
    served: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.scheduler = self.module.KvtierConnector(self.config, Role.SCHEDULER, kv_cache_config())
        self.worker = self.module.KvtierConnector(self.config, Role.WORKER, kv_cache_config())
        shape = (BLOCKS, 2, BLOCK_TOKENS, HEADS, HEAD_SIZE)
        self.kv = {name: torch.zeros(shape, dtype=torch.bfloat16) for name in LAYERS}
        self.worker.register_kv_caches(self.kv)

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()

    def request(self, tokens: Sequence[int], lora: Any = None, name: str = "") -> SimpleNamespace:
        """What vLLM's scheduler knows of a request; hashes as vLLM makes them, with the adapter's
        name and nothing of its content."""
        self.served += 1
        hashes, parent = [], b"" if lora is None else lora.lora_name.encode()
        for start in range(0, len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS):
            text = repr(list(tokens[start : start + BLOCK_TOKENS])).encode()
            parent = hashlib.sha256(parent + text).digest()
            hashes.append(parent)
        return SimpleNamespace(
            request_id=name or f"r{self.served}",
            block_hashes=hashes,
            lora_request=lora,
            num_tokens=len(tokens),
            skip_reading_prefix_cache=False,
        )

    def serve(
        self, tokens: Sequence[int], *, lora: Any = None, local: int = 0, content: str = ""
    ) -> Answer:
        """A request from first to last. `local`: tokens that lie in vLLM's own prefix cache.
        `content`: what the adapter's weights are."""
        request = self.request(tokens, lora)
        self.scheduler.on_new_request(request)
        found, _ = self.scheduler.get_num_new_matched_tokens(request, local)
        blocks = list(range(1, 1 + -(-len(tokens) // BLOCK_TOKENS)))
        for block in blocks:
            self._fill(block, b"left over from somebody else")
        for block, digest in zip(
            blocks[: local // BLOCK_TOKENS], request.block_hashes, strict=False
        ):
            self._fill(block, self._bytes(digest, content))
        self.scheduler.update_state_after_alloc(request, None, found)
        computed = local + found
        plan = self.scheduler.build_connector_meta(
            scheduled(request.request_id, blocks, computed, len(tokens) - computed)
        )
        self.worker.bind_connector_metadata(plan)
        if plan.loads:
            self.worker.start_load_kv(None)
        bad = self.worker.get_block_ids_with_load_errors()
        stale = 0
        for number, (block, digest) in enumerate(zip(blocks, request.block_hashes, strict=False)):
            right = self._bytes(digest, content)
            if number * BLOCK_TOKENS >= computed or block in bad:
                self._fill(block, right)
            else:
                stale += self._read(block) != self._expanded(right)
        self.forward()
        if not plan.loads:
            self.worker.start_load_kv(None)  # as vLLM does it
        self.worker.wait_for_save()
        self.scheduler.update_connector_output(SimpleNamespace(invalid_block_ids=bad))
        self.scheduler.request_finished(request, blocks)
        return Answer(found, stale, bad, self.worker._speed.tokens_per_second)

    def _bytes(self, digest: bytes, content: str) -> bytes:
        return hashlib.sha256(digest + self.weights.encode() + content.encode()).digest()

    @staticmethod
    def _expanded(seed: bytes) -> bytes:
        return (seed * BLOCK_BYTES)[:BLOCK_BYTES] * len(LAYERS)

    def _fill(self, block: int, seed: bytes) -> None:
        raw = torch.frombuffer(bytearray((seed * BLOCK_BYTES)[:BLOCK_BYTES]), dtype=torch.uint8)
        for layer in self.kv.values():
            layer[block].view(-1).view(torch.uint8).copy_(raw)

    def _read(self, block: int) -> bytes:
        return b"".join(
            layer[block].reshape(-1).view(torch.uint8).numpy().tobytes()
            for layer in self.kv.values()
        )


def scheduled(request_id: str, blocks: list[int], computed: int, tokens: int) -> SimpleNamespace:
    """A `SchedulerOutput` with one new request."""
    new = SimpleNamespace(req_id=request_id, block_ids=(blocks,), num_computed_tokens=computed)
    nothing = SimpleNamespace(
        req_ids=[], new_block_ids=[], resumed_req_ids=set(), num_computed_tokens=[]
    )
    return SimpleNamespace(
        total_num_scheduled_tokens=tokens,
        num_scheduled_tokens={request_id: tokens},
        scheduled_new_reqs=[new],
        scheduled_cached_reqs=nothing,
    )
