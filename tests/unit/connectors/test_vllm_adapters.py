"""An adapter is its content: whose content nobody can tell has no pages."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from kvtier_agent.connectors.vllm.adapters import Adapters, adapter_digest


@pytest.fixture
def folder(tmp_path) -> Path:
    made = tmp_path / "sql"
    made.mkdir()
    (made / "adapter_config.json").write_text("{}")
    (made / "adapter_model.safetensors").write_bytes(b"1" * 100)
    return made


def lora(number: int, path, **more) -> SimpleNamespace:
    return SimpleNamespace(lora_name="sql", lora_int_id=number, lora_path=str(path), **more)


def train_again(folder: Path) -> None:
    os.utime(folder / "adapter_model.safetensors", ns=(1, 1))


def test_the_same_files_are_the_same_adapter(folder) -> None:
    first = adapter_digest(str(folder))
    assert first is not None
    assert len(first) == 16
    (folder / "README.md").write_text("no weights")
    assert adapter_digest(str(folder)) == first
    train_again(folder)
    assert adapter_digest(str(folder)) != first


@pytest.mark.parametrize("path", ["", "org/on-a-hub", "/nowhere"])
def test_what_is_not_there_has_no_name(path) -> None:
    assert adapter_digest(path) is None


def test_a_request_without_an_adapter_is_the_models_own() -> None:
    assert Adapters().digest(None) == b""


def test_an_adapter_that_is_loaded_again_is_looked_at_again(folder) -> None:
    adapters = Adapters()
    first = adapters.digest(lora(1, folder))
    train_again(folder)
    second = adapters.digest(lora(2, folder))
    assert first is not None
    assert second is not None
    assert first != second


def test_files_that_change_under_a_loaded_adapter_end_its_caching(folder, caplog) -> None:
    adapters = Adapters()
    before = (folder / "adapter_model.safetensors").stat().st_mtime_ns
    assert adapters.digest(lora(1, folder)) is not None
    train_again(folder)
    with caplog.at_level(logging.WARNING):
        assert adapters.digest(lora(1, folder)) is None
        os.utime(folder / "adapter_model.safetensors", ns=(before, before))
        assert adapters.digest(lora(1, folder)) is None, "vLLM may have read either"
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("more", [{"load_inplace": True}, {"tensorizer_config_dict": {"a": 1}}])
def test_weights_that_may_be_read_anew_have_no_name(folder, more, caplog) -> None:
    adapters = Adapters()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert adapters.digest(lora(1, folder, **more)) is None
    assert len(caplog.messages) == 1
