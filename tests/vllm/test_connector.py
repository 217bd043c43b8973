"""A real engine gets the same tokens from the tiers as from its own prefix cache.

The reference is vLLM's own prefix-cache hit of the same length: in bf16 an uncached run differs
from a cached one by itself, because the prompt is computed in other pieces.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kvtier_agent.cache.geometry import Geometry

PAGE_TOKENS = 64
REQUESTS = 20
OUTPUT_TOKENS = 16

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def prompts(engine: Any) -> list[list[int]]:
    """20 prompts with shared beginnings, each a few tokens longer than a number of whole pages."""
    tokenizer = engine.get_tokenizer()
    system = "You are a careful assistant that answers from the notes below and nothing else. " * 8
    made = []
    for number in range(REQUESTS):
        notes = " ".join(
            f"Note {i}: ticket {number * 37 + i * 11} was closed by team {(number + i) % 7}."
            for i in range(8 + number)
        )
        tokens = tokenizer.encode(f"{system}{notes} Question: which team closed ticket {number}?")
        made.append(tokens[: len(tokens) // PAGE_TOKENS * PAGE_TOKENS] + tokens[-5:])
    return made


def run(
    engine: Any, prompts: list[list[int]], lora: Any = None
) -> tuple[list[list[int]], list[int]]:
    """Output tokens, and how many prompt tokens were not computed, of each request in turn."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    tokens, cached = [], []
    for prompt in prompts:  # one at a time: a batch of another shape rounds differently
        (output,) = engine.generate(
            {"prompt_token_ids": prompt}, sampling, use_tqdm=False, lora_request=lora
        )
        tokens.append(list(output.outputs[0].token_ids))
        cached.append(output.num_cached_tokens)
    return tokens, cached


@pytest.fixture(scope="module")
def reference(engine: Any, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """What the engine says when everything comes out of its own prefix cache."""
    run(engine, prompts)
    return run(engine, prompts)


def test_hits_from_the_tiers_equal_the_engines_own_hits(
    engine: Any, prompts: list[list[int]], reference: tuple[list[list[int]], list[int]]
) -> None:
    engine.reset_prefix_cache()
    tokens, cached = run(engine, prompts)
    assert cached == reference[1], "every whole page must come from the tiers"
    assert min(cached) >= 2 * PAGE_TOKENS
    assert tokens == reference[0]


def test_a_damaged_page_is_recomputed_and_never_used(
    engine: Any, agent: Any, prompts: list[list[int]], reference: tuple[list[list[int]], list[int]]
) -> None:
    engine.reset_prefix_cache()
    scribble(agent.folder / "shm")
    tokens, _ = run(engine, prompts)
    engine.reset_prefix_cache()
    again, cached = run(engine, prompts)
    assert cached == reference[1], "the damaged pages were computed and stored again"
    assert again == reference[0]
    assert [len(t) for t in tokens] == [OUTPUT_TOKENS] * REQUESTS


def test_the_engine_goes_on_without_an_agent_and_finds_it_again(
    engine: Any, agent: Any, prompts: list[list[int]], reference: tuple[list[list[int]], list[int]]
) -> None:
    agent.stop()
    engine.reset_prefix_cache()
    _, cached = run(engine, prompts[:3])
    assert cached[0] == 0
    agent.start()
    engine.reset_prefix_cache()
    for _ in range(20):  # the connector looks for the agent every two seconds at the latest
        engine.reset_prefix_cache()
        run(engine, prompts[:1])
        engine.reset_prefix_cache()
        tokens, cached = run(engine, prompts[:1])
        if cached[0]:
            break
    assert cached[0] == reference[1][0]
    assert tokens[0] == reference[0][0]


def write_adapter(folder: Path, seed: int) -> None:
    """A LoRA adapter of SmolLM2's attention, strong enough to change what is said."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(30):
        for name, width in (("q_proj", 576), ("k_proj", 192), ("v_proj", 192)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(8, 576, generator=generator) / 24
            weights[f"{at}.lora_B.weight"] = torch.randn(width, 8, generator=generator) / 3
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 8,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "k_proj", "v_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def test_an_adapter_that_was_trained_again_gets_nothing_of_the_old_one(
    engine: Any, prompts: list[list[int]], reference: tuple[Any, list[int]], tmp_path: Path
) -> None:
    from vllm.lora.request import LoRARequest

    folder, whole = tmp_path / "tickets", reference[1][:1]
    write_adapter(folder, 1)
    old = LoRARequest("tickets", 1, str(folder))
    run(engine, prompts[:1], old)
    own, _ = run(engine, prompts[:1], old)
    engine.reset_prefix_cache()
    tokens, cached = run(engine, prompts[:1], old)
    assert (tokens, cached) == (own, whole), "its pages come from the tiers"

    write_adapter(folder, 2)
    new = LoRARequest("tickets", 2, str(folder))
    engine.reset_prefix_cache()
    _, cached = run(engine, prompts[:1], new)
    assert cached == [0]
    own, _ = run(engine, prompts[:1], new)
    engine.reset_prefix_cache()
    again, cached = run(engine, prompts[:1], new)
    assert (again, cached) == (own, whole)
    assert again != tokens, "the adapters differ in what they say"

    engine.reset_prefix_cache()
    _, cached = run(engine, prompts[:1], old)
    assert cached == [0], "its files changed while it was loaded"
    engine.reset_prefix_cache()


def test_after_a_reset_of_the_connector_nothing_of_before_is_loaded(
    engine: Any, prompts: list[list[int]], reference: tuple[list[list[int]], list[int]]
) -> None:
    engine.reset_prefix_cache()
    assert run(engine, prompts[:1])[1] == reference[1][:1]
    assert engine.reset_prefix_cache(reset_connector=True)
    assert run(engine, prompts[:1])[1] == [0]
    engine.reset_prefix_cache()
    tokens, cached = run(engine, prompts[:1])
    assert (tokens, cached) == (reference[0][:1], reference[1][:1])


def test_what_this_vllm_does_by_default_is_refused() -> None:
    from kvtier_agent.connectors.vllm.settings import SettingsError, check_failure_policy
    from vllm.config import KVTransferConfig

    with pytest.raises(SettingsError, match='"recompute"'):
        check_failure_policy(KVTransferConfig(kv_connector="K", kv_role="kv_both"))


def test_sliding_layers_of_this_vllm_are_refused() -> None:
    import torch
    from kvtier_agent.connectors.vllm.layout import UnsupportedModelError, engine_layout
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    spec = SlidingWindowSpec(
        block_size=32, num_kv_heads=3, head_size=64, dtype=torch.bfloat16, sliding_window=128
    )
    caches = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))
    with pytest.raises(UnsupportedModelError, match="SlidingWindowSpec"):
        engine_layout(config, caches, None)


def scribble(folder: Path) -> None:
    """Overwrite what the arena holds, as a client gone mad would."""
    arenas = [f for f in folder.rglob("*") if f.is_file() and f.stat().st_size > 64 << 20]
    assert arenas, f"no arena in {folder}"
    for path in arenas:
        data = np.memmap(path, dtype=np.uint8, mode="r+")
        data[: 64 << 20 : 4096] ^= 0xFF


def test_the_geometry_follows_the_model() -> None:
    geometry = Geometry(30, 3, 64, 2, PAGE_TOKENS)
    assert geometry.bytes_per_token == 23040
