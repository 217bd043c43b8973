"""Weights have another name whenever they may be others: their pages are never mixed up."""

import os
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="the connector's layout module needs torch")

from kvtier_agent.connectors.vllm.layout import weights_revision


def model(name: str = "org/model", **changes) -> SimpleNamespace:
    config = SimpleNamespace(_commit_hash=changes.pop("commit", None))
    base = {"model": name, "revision": None, "quantization": None, "hf_overrides": {}}
    return SimpleNamespace(**{**base, **changes}, hf_config=config)


def test_the_same_weights_have_the_same_name() -> None:
    assert weights_revision(model()) == weights_revision(model(revision="main"))


@pytest.mark.parametrize(
    "changes",
    [
        {"revision": "v2"},
        {"commit": "0123abc"},
        {"quantization": "awq"},
        {"hf_overrides": {"rope_theta": 1e6}},
        {"name": "org/other"},
    ],
)
def test_whatever_changes_the_weights_changes_their_name(changes) -> None:
    assert weights_revision(model(**changes)) != weights_revision(model())


def test_a_folder_that_is_written_anew_holds_other_weights(tmp_path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"1" * 100)
    os.utime(weights, ns=(1, 1))
    first = weights_revision(model(str(tmp_path)))
    (tmp_path / "README.md").write_text("no weights")
    assert weights_revision(model(str(tmp_path))) == first
    os.utime(weights, ns=(2, 2))
    assert weights_revision(model(str(tmp_path))) != first


def test_a_long_path_still_fits_the_protocol(tmp_path) -> None:
    assert len(weights_revision(model("/models/" + "x" * 1000))) <= 128
