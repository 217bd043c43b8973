"""How vLLM lays KV out in memory, and how its blocks become the bytes of a page.

A page is layer-major: all blocks of layer 0, then all of layer 1, and so on, each block as raw
bytes in the order in which vLLM holds them. That order depends on the attention backend and, on
CPUs, on the instruction set, so both are part of the fingerprint: a page from a machine that
arranges its bytes in another way has another key and is never found.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.connectors.vllm.fingerprint import kv_dtype, weights_revision

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class UnsupportedModelError(ValueError):
    """A model or set-up that this connector cannot serve; the message says what to do."""


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """What scheduler and worker must agree on; both compute it from the same configuration."""

    geometry: Geometry
    layer_names: tuple[str, ...]
    block_tokens: int
    block_bytes: int
    """Bytes of one block of one layer."""
    blocks_per_page: int


def engine_layout(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    page_tokens: int | None,
    weights: str = "",
) -> EngineLayout:
    """The layout of this engine's KV.

    page_tokens: tokens per page, a multiple of the engine's block; None = the largest multiple
    of the block that is at most 256, or one block. weights: see `weights_revision`, `given`.
    Raises UnsupportedModelError for what whole pages of one kind of layer cannot hold.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise UnsupportedModelError(
            f"the model has {len(groups)} kinds of attention layers; kvtier serves models whose "
            "layers all keep full KV. Run this model without the connector"
        )
    parallel = vllm_config.parallel_config
    if parallel.world_size != 1:
        raise UnsupportedModelError(
            f"the engine runs on {parallel.world_size} ranks; the connector serves one rank. "
            "Set tensor and pipeline parallel size to 1"
        )
    spec: Any = groups[0].kv_cache_spec
    _check_spec(spec)
    cache = vllm_config.cache_config
    if getattr(cache, "calculate_kv_scales", False):
        raise UnsupportedModelError(
            "calculate_kv_scales measures the scales of the KV anew in every process, so a page "
            "means something else after a restart. Leave it out (the scales are then the "
            "checkpoint's, or 1), or run this model without the connector"
        )
    block_tokens = int(spec.block_size)
    tokens = page_tokens if page_tokens is not None else max(1, 256 // block_tokens) * block_tokens
    if tokens <= 0 or tokens % block_tokens:
        raise UnsupportedModelError(
            f"kvtier.page_tokens is {tokens}; write a multiple of vLLM's block of {block_tokens}"
        )
    hash_tokens = kv_cache_config.hash_block_size
    if hash_tokens is not None and hash_tokens != block_tokens:
        raise UnsupportedModelError(
            f"vLLM hashes blocks of {hash_tokens} tokens but allocates {block_tokens}; "
            "leave hash_block_size at its default"
        )
    layers = tuple(groups[0].layer_names)
    geometry = Geometry(
        layers=len(layers),
        kv_heads=int(spec.num_kv_heads),
        head_size=int(spec.head_size),
        dtype_bytes=spec.dtype.itemsize,
        page_tokens=tokens,
        weights=weights_revision(
            vllm_config.model_config,
            given=weights,
            load_format=str(vllm_config.load_config.load_format),
        ),
        dtype=kv_dtype(str(spec.dtype), str(cache.cache_dtype)),
        layout=_layout(vllm_config, kv_cache_config, block_tokens),
    )
    block_bytes = int(spec.page_size_bytes)
    if geometry.page_bytes != block_bytes * (tokens // block_tokens) * len(layers):
        raise UnsupportedModelError(
            "the KV of this model is not 2 x heads x head size per token (MLA, or a padded or "
            "quantised cache); run it without the connector"
        )
    return EngineLayout(geometry, layers, block_tokens, block_bytes, tokens // block_tokens)


def _check_spec(spec: Any) -> None:
    """Raises UnsupportedModelError for layers that let go of blocks, or keep no KV at all.

    A uniformly sliding model is one group of layers too, but its early blocks are vLLM's null
    block, or another request's by now. Layers that slide while vLLM keeps all their blocks, as in a
    mixed model without the hybrid allocator, are `FullAttentionSpec`.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    if type(spec) is not FullAttentionSpec:
        raise UnsupportedModelError(
            f"the model's layers keep {type(spec).__name__}; kvtier serves models whose layers all "
            "keep full KV (FullAttentionSpec). Run this model without the connector"
        )
    if getattr(spec, "non_causal", False):
        raise UnsupportedModelError(
            "the model's layers look ahead (non-causal attention), so a page depends on what comes "
            "after it. Run this model without the connector"
        )


def _layout(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, block_tokens: int) -> str:
    import vllm

    device = vllm_config.device_config.device_type
    parts = [
        "vllm",
        ".".join(vllm.__version__.split(".")[:2]),
        str(device),
        str(kv_cache_config.kv_cache_layout or "default"),
        f"block{block_tokens}",
        str(vllm_config.attention_config.backend or "auto"),
    ]
    if device == "cpu":
        amx = "amx" if torch.cpu._is_amx_tile_supported() else "noamx"
        parts += [platform.machine(), torch.backends.cpu.get_cpu_capability(), amx]
    return "/".join(parts)


class BlockCopier:
    """Copies whole pages between the engine's KV tensors and host buffers.

    kv_caches: layer name -> tensor whose memory is `num_blocks` equal runs of bytes.
    Raises UnsupportedModelError when a tensor is not laid out so.
    """

    def __init__(
        self, layout: EngineLayout, kv_caches: Mapping[str, torch.Tensor], num_blocks: int
    ) -> None:
        self._layout = layout
        self._layers = [
            _as_blocks(name, kv_caches[name], num_blocks, layout.block_bytes)
            for name in layout.layer_names
        ]

    @property
    def device(self) -> torch.device:
        return self._layers[0].device

    def gather(self, block_ids: Sequence[int], out: torch.Tensor) -> None:
        """Copy the pages of these blocks into `out`, uint8 (pages, page_bytes) in host memory.

        It waits until the device has computed them.
        """
        pages = len(out)
        index = torch.tensor(block_ids, dtype=torch.long, device=self.device)
        on_device = out if out.device == self.device else torch.empty_like(out, device=self.device)
        by_layer = on_device.view(pages, len(self._layers), -1)
        for number, layer in enumerate(self._layers):
            by_layer[:, number] = layer.index_select(0, index).view(pages, -1)
        if on_device is not out:
            out.copy_(on_device)

    def scatter(self, pages: torch.Tensor, block_ids: Sequence[int], skip_blocks: int) -> None:
        """Write pages (pages, page_bytes) into these blocks, the first `skip_blocks` excepted."""
        index = torch.tensor(block_ids[skip_blocks:], dtype=torch.long, device=self.device)
        by_layer = pages.to(self.device).view(pages.shape[0], len(self._layers), -1)
        for number, layer in enumerate(self._layers):
            blocks = by_layer[:, number].reshape(len(block_ids), self._layout.block_bytes)
            layer[index] = blocks[skip_blocks:]

    def wait(self) -> None:
        """Until the device has computed what it was given so far."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).current_stream().synchronize()

    def zero(self, block_ids: Sequence[int]) -> None:
        """Blank blocks whose load failed: left-over NaN in a block would poison its next user."""
        index = torch.tensor(block_ids, dtype=torch.long, device=self.device)
        for layer in self._layers:
            layer[index] = 0


def _as_blocks(name: str, tensor: torch.Tensor, num_blocks: int, block_bytes: int) -> torch.Tensor:
    """A uint8 view (num_blocks, block_bytes) over the tensor's own memory."""
    total = tensor.numel() * tensor.element_size()
    if total != num_blocks * block_bytes or not _blocks_outermost(tensor, num_blocks):
        raise UnsupportedModelError(
            f"layer {name} holds {tuple(tensor.shape)} with strides {tensor.stride()}: blocks are "
            "not contiguous in memory. Choose an attention backend that keeps a block in one piece"
        )
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    flat.set_(tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size(), (total,))
    return flat.view(num_blocks, block_bytes)


def _blocks_outermost(tensor: torch.Tensor, num_blocks: int) -> bool:
    """True when dimension 0 counts blocks and each block is one dense run of memory."""
    if tensor.shape[0] % num_blocks:
        return False
    inner = tensor.numel() // tensor.shape[0]
    return tensor.stride(0) == inner and tensor[0].numel() == inner and _dense(tensor[0])


def _dense(block: torch.Tensor) -> bool:
    """True when the block's elements fill one run of memory, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(block.stride(), block.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
