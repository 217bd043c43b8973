"""Both halves of the connector, a request at a time, on a real agent; vLLM is a stand-in."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the connector needs torch")

import fake_vllm
import torch
from fake_vllm import PAGE_TOKENS, adapter
from kvtier_agent.connectors.vllm.layout import UnsupportedModelError, engine_layout
from kvtier_agent.connectors.vllm.settings import SettingsError

PROMPT = list(range(45))
"""Five whole pages and a part of one."""
WHOLE = 5 * PAGE_TOKENS


def write_adapter(folder: Path, content: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_text(content)
    return folder


def test_what_one_engine_computed_another_one_loads(start) -> None:
    assert start().serve(PROMPT).cached == 0
    answer = start().serve(PROMPT)
    assert (answer.cached, answer.stale, answer.bad) == (WHOLE, 0, set())


def test_an_adapter_has_pages_of_its_own(start, tmp_path) -> None:
    engine = start()
    folder = write_adapter(tmp_path / "sql", "one")
    engine.serve(PROMPT)
    assert engine.serve(PROMPT, lora=adapter("sql", 1, folder), content="one").cached == 0
    assert engine.serve(PROMPT, lora=adapter("sql", 1, folder), content="one").cached == WHOLE
    assert engine.serve(PROMPT).cached == WHOLE


def test_an_adapter_that_was_trained_again_gets_nothing_of_the_old_one(start, tmp_path) -> None:
    folder = write_adapter(tmp_path / "sql", "one")
    start().serve(PROMPT, lora=adapter("sql", 1, folder), content="one")
    write_adapter(folder, "another")
    engine = start()
    first = engine.serve(PROMPT, lora=adapter("sql", 1, folder), content="another")
    assert (first.cached, first.stale) == (0, 0)
    second = engine.serve(PROMPT, lora=adapter("sql", 1, folder), content="another")
    assert (second.cached, second.stale) == (WHOLE, 0)


def test_an_adapter_that_nobody_can_look_into_is_neither_loaded_nor_saved(start) -> None:
    engine = start()
    for _ in range(2):
        assert engine.serve(PROMPT, lora=adapter("sql", 1, "org/on-a-hub")).cached == 0
    assert engine.serve(PROMPT).cached == 0, "and nothing of it is taken for the model's own"


def test_after_a_reset_nothing_of_the_old_weights_is_loaded(start) -> None:
    engine = start(weights="old")
    engine.serve(PROMPT)
    engine.weights = "new"
    assert engine.scheduler.reset_cache() is True
    first = engine.serve(PROMPT)
    assert (first.cached, first.stale) == (0, 0)
    second = engine.serve(PROMPT)
    assert (second.cached, second.stale) == (WHOLE, 0)


def test_pages_of_weights_that_no_name_says_are_found_by_no_other_engine(start) -> None:
    engine = start(weights="old")
    engine.weights = "new"
    engine.scheduler.reset_cache()
    engine.serve(PROMPT)
    assert start(weights="old").serve(PROMPT).cached == 0


def test_a_long_prefix_comes_in_groups(start, connector, monkeypatch) -> None:
    monkeypatch.setattr("kvtier_agent.connectors.vllm.settings.MIB", 2 * fake_vllm.PAGE_BYTES)
    engine = start(group_mebibytes=1)
    asked = calls(engine.worker._client, "load", monkeypatch)
    engine.serve(PROMPT)
    answer = engine.serve(PROMPT)
    assert (answer.cached, answer.stale) == (WHOLE, 0)
    assert [len(keys) for keys in asked] == [2, 2, 1]


def test_what_the_agent_has_is_not_copied_off_the_device(start, monkeypatch) -> None:
    engine = start()
    gathered = calls(engine.worker._copier, "gather", monkeypatch)
    engine.serve(PROMPT)
    assert [len(blocks) for blocks in gathered] == [10]
    gathered.clear()
    engine.serve(PROMPT, local=WHOLE)
    assert gathered == []


def test_pages_that_the_agent_lost_come_back_from_a_local_hit(start, agent, monkeypatch) -> None:
    engine = start()
    engine.serve(PROMPT)
    key = next(iter(engine_keys(engine, PROMPT)[2:]))
    engine.worker._client.delete([key])
    gathered = calls(engine.worker._copier, "gather", monkeypatch)
    engine.serve(PROMPT, local=WHOLE)
    assert [len(blocks) for blocks in gathered] == [2]
    assert engine.serve(PROMPT).cached == WHOLE


def test_the_prefill_speed_is_measured_before_pages_are_copied(
    start, connector, monkeypatch
) -> None:
    engine = start()
    now = [0.0]
    monkeypatch.setattr(connector, "time", SimpleNamespace(monotonic=lambda: now[0]))
    gather = engine.worker._copier.gather

    def computing() -> None:
        now[0] += 0.5

    def slow_copy(*arguments: Any) -> None:
        now[0] += 10
        gather(*arguments)

    engine.forward = computing
    monkeypatch.setattr(engine.worker._copier, "gather", slow_copy)
    measured = len(PROMPT) / 0.5 * (1 + len(PROMPT) / 2 / 30_500)
    assert engine.serve(PROMPT).tokens_per_second == pytest.approx(measured)


def test_a_policy_that_ends_requests_is_refused(connector) -> None:
    config = fake_vllm.vllm_config(policy="fail")
    with pytest.raises(SettingsError, match='"kv_load_failure_policy": "recompute"'):
        connector.KvtierConnector(config, fake_vllm.Role.SCHEDULER, fake_vllm.kv_cache_config())


@pytest.mark.parametrize("spec", [fake_vllm.SlidingWindowSpec(), fake_vllm.MambaSpec()])
def test_layers_that_let_go_of_their_kv_are_refused(connector, spec) -> None:
    with pytest.raises(UnsupportedModelError, match=type(spec).__name__):
        engine_layout(fake_vllm.vllm_config(), fake_vllm.kv_cache_config(spec), None)


def test_layers_that_look_ahead_are_refused(connector) -> None:
    spec = fake_vllm.FullAttentionSpec(non_causal=True)
    with pytest.raises(UnsupportedModelError, match="look ahead"):
        engine_layout(fake_vllm.vllm_config(), fake_vllm.kv_cache_config(spec), None)


def test_the_format_of_the_kv_is_part_of_its_name(connector) -> None:
    names = set()
    for cache_dtype in ("fp8", "fp8_e5m2"):
        config = fake_vllm.vllm_config()
        config.cache_config.cache_dtype = cache_dtype
        caches = fake_vllm.kv_cache_config(fake_vllm.FullAttentionSpec(dtype=torch.uint8))
        names.add(engine_layout(config, caches, None).geometry.fingerprint)
    assert len(names) == 2


def test_scales_of_one_process_are_refused(connector) -> None:
    config = fake_vllm.vllm_config()
    config.cache_config.calculate_kv_scales = True
    with pytest.raises(UnsupportedModelError, match="calculate_kv_scales"):
        engine_layout(config, fake_vllm.kv_cache_config(), None)


def calls(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """First arguments of the calls of a method, which goes on working."""
    real, seen = getattr(owner, name), []

    def recorded(first: Any, *rest: Any, **named: Any) -> Any:
        seen.append(first)
        return real(first, *rest, **named)

    monkeypatch.setattr(owner, name, recorded)
    return seen


def engine_keys(engine: Any, tokens: list[int]) -> list[bytes]:
    request = engine.request(tokens, name="keys")
    engine.scheduler.on_new_request(request)
    keys = engine.scheduler._planner.keys("keys", len(tokens))
    engine.scheduler.request_finished(request, [])
    return keys
