"""The vLLM connector: whole pages, loaded before and saved after the forward pass.

One flag makes an engine use the node's tiers:

    --kv-transfer-config '{"kv_connector": "KvtierConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvtier_agent.connectors.vllm",
        "kv_connector_extra_config": {"kvtier.socket": "/run/kvtier/default.sock"},
        "kv_load_failure_policy": "recompute"}'

vLLM makes two objects of this class, in two processes: the SCHEDULER one asks what is cached and
plans (`plan.RequestPlanner`), the WORKER one moves bytes (`layout.BlockCopier`). They share
nothing but the metadata that vLLM carries from one to the other each step.

An agent that is absent, restarted or slow is a miss: the client answers "nothing cached" and the
engine computes. A page that cannot be loaded although it was promised is reported block by block,
and vLLM recomputes from there. That takes `kv_load_failure_policy: recompute`; with its default
vLLM would end the request with an error, so the connector does not start without it.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from kvtier_agent.cache.identity import KEY_BYTES, as_keys, child_key_from_digest
from kvtier_agent.cache.settings import CacheSettings
from kvtier_agent.connectors.vllm.adapters import Adapters
from kvtier_agent.connectors.vllm.layout import BlockCopier, EngineLayout, engine_layout
from kvtier_agent.connectors.vllm.plan import (
    LoadPages,
    RequestPlanner,
    SaveGuard,
    SavePages,
    request_number,
)
from kvtier_agent.connectors.vllm.settings import check_failure_policy, read_settings
from kvtier_agent.connectors.vllm.speed import PrefillSpeed
from kvtier_agent.connectors.vllm.transfer import PageTransfer
from kvtier_agent.server.client import Client

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger(__name__)


@dataclass
class StepPlan(KVConnectorMetadata):  # type: ignore[misc]
    """What the worker does in one step; empty most of the time."""

    loads: list[LoadPages] = field(default_factory=list)
    saves: list[SavePages] = field(default_factory=list)
    step: int = 0
    """Counts the steps of this engine."""
    failures: int = 0
    """Failed loads that the scheduler had heard of when it made this plan."""
    tokens: int = 0
    """Tokens that the forward pass computes, over all requests."""
    depths: float = 0.0
    """Sum of these tokens' positions in their prompts."""

    @property
    def mean_depth(self) -> float:
        """How deep in their prompts the step's tokens stand on average, tokens."""
        return self.depths / self.tokens if self.tokens else 0.0


class KvtierConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Both halves of the connector; vLLM decides which by `role`."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_failure_policy(self._kv_transfer_config)
        self._settings = read_settings(self._kv_transfer_config.kv_connector_extra_config)
        self._layout: EngineLayout = engine_layout(
            vllm_config, kv_cache_config, self._settings.page_tokens, self._settings.weights
        )
        self._client = Client(
            self._settings.socket,
            self._layout.geometry,
            timeout_seconds=self._settings.timeout_seconds,
            name=f"vllm-{role.name.lower()}",
            tenant=self._settings.tenant,
            # The workers hold the engine's pool, one rank each; the scheduler none.
            kv_pool_bytes=(
                kv_cache_config.num_blocks
                * self._layout.block_tokens
                * self._layout.geometry.bytes_per_token
                if role is KVConnectorRole.WORKER
                else 0
            ),
        )
        if not self._client.connected:
            log.warning("kvtier: no agent yet (%s); computing", self._client.counters.last_error)
        self._planner = RequestPlanner(
            self._client.root,
            self._layout.block_tokens,
            self._layout.geometry.page_tokens,
            child_key_from_digest,
        )
        self._adapters = Adapters()
        self._num_blocks = kv_cache_config.num_blocks
        self._copier: BlockCopier | None = None
        self._transfer: PageTransfer | None = None
        self._bad_blocks: set[int] = set()
        self._guard = SaveGuard()
        self._steps = 0
        self._failures = 0
        self._speed = PrefillSpeed(self._layout.geometry.page_tokens, CacheSettings().parity_tokens)

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped save is a later miss, nothing that a request must wait for."""
        return False

    # -- scheduler side ------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        if request.request_id not in self._planner:
            adapter = self._adapters.digest(request.lora_request)
            self._planner.track(request.request_id, request.block_hashes, adapter)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens beyond vLLM's own hit that the tiers hold and that are worth loading."""
        request_id = request.request_id
        self.on_new_request(request)
        if request.skip_reading_prefix_cache:
            return 0, False
        keys = self._planner.loadable_keys(request_id, request.num_tokens)
        if not self._planner.offer(request_id, len(keys), num_computed_tokens):
            return 0, False
        # Pages that vLLM holds itself are neither loaded nor computed: they are no question.
        page_tokens = self._layout.geometry.page_tokens
        first = num_computed_tokens // page_tokens
        found = self._client.lookup(
            as_keys(b"".join(keys[first:])),
            depth=first * page_tokens,
            total_tokens=request.num_tokens,
            request=request_number(request_id),
        )
        return self._planner.offer(request_id, first + found.load, num_computed_tokens), False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._planner.allocated(request.request_id, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._steps += 1
        plan = StepPlan(
            step=self._steps,
            failures=self._failures,
            tokens=scheduler_output.total_num_scheduled_tokens,
        )
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            self._planner.blocks_replaced(new.req_id, new.block_ids[0])
            self._add(plan, new.req_id, new.num_computed_tokens, scheduled[new.req_id])
        cached = scheduler_output.scheduled_cached_reqs
        for number, request_id in enumerate(cached.req_ids):
            block_ids = cached.new_block_ids[number]
            if request_id in cached.resumed_req_ids:
                self._planner.blocks_replaced(request_id, block_ids[0] if block_ids else ())
            elif block_ids is not None:
                self._planner.blocks_appended(request_id, block_ids[0])
            computed = cached.num_computed_tokens[number]
            self._add(plan, request_id, computed, scheduled[request_id])
        return plan

    def _add(self, plan: StepPlan, request_id: str, computed: int, scheduled: int) -> None:
        plan.depths += scheduled * (computed + scheduled / 2)
        load, save = self._planner.step(request_id, computed + scheduled)
        if load is not None:
            plan.loads.append(load)
        if save is not None:
            plan.saves.append(save)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if connector_output.invalid_block_ids:
            self._failures += 1
            self._planner.load_failed()

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._planner.forget(request.request_id)
        return False, None

    # -- worker side ---------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._copier = BlockCopier(self._layout, kv_caches, self._num_blocks)
        self._transfer = PageTransfer(self._client, self._copier, self._layout, self._settings)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins. (vLLM calls `start_load_kv` after the forward pass where nothing is to be
        loaded, so that is no beginning.)"""
        super().bind_connector_metadata(connector_metadata)
        self._speed.begin(time.monotonic())

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        plan = self._plan()
        until = time.monotonic() + self._settings.step_timeout_seconds
        for load in plan.loads:
            assert self._transfer is not None
            bad = self._transfer.load(load, until)
            if bad:
                self._guard.failed(plan.step)
                self._bad_blocks.update(bad)
        if plan.loads:
            self._speed.begin(time.monotonic())  # anew: waiting for pages is no computing

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are complete before the forward pass begins."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Pages hold all layers: they are saved once the last layer is done (`wait_for_save`)."""

    def wait_for_save(self) -> None:
        plan = self._plan()
        if not plan.saves or not self._guard.may_save(plan.step, plan.failures):
            return  # perhaps computed on blank blocks: wrong, and recomputed by vLLM
        assert self._copier is not None
        assert self._transfer is not None
        if self._speed.counts(plan.tokens):
            self._copier.wait()  # the copies below are no part of computing
            self._speed.end(time.monotonic(), plan.tokens, plan.mean_depth)
        for save in plan.saves:
            self._transfer.save(save, self._speed.tokens_per_second)

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def reset_cache(self) -> bool | None:
        """What was computed so far is void, since the weights are others now: vLLM's scheduler asks
        for it when its own cache is cleared along with its connector's.

        Nothing says which weights these are, so the pages from here on have names that only this
        engine knows, until it starts again. Those of before age out.
        """
        self._planner.reset(child_key_from_digest(self._client.root, os.urandom(KEY_BYTES)))
        log.warning("kvtier: the cache was reset; pages are shared with nobody until a restart")
        return True

    def shutdown(self) -> None:
        self._client.close()

    def _plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, StepPlan)
        return plan
