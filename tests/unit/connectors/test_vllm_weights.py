"""Weights have another name whenever they may be others: their pages are never mixed up."""

import os
from types import SimpleNamespace

import pytest
from kvtier_agent.connectors.vllm.fingerprint import kv_dtype, weights_revision


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


def test_a_name_that_is_given_holds_wherever_the_files_are(tmp_path) -> None:
    folders = [tmp_path / "pod-1", tmp_path / "pod-2"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"1" * 100)
        os.utime(folder / "model.safetensors", ns=(number, number))
    first, second = (model(str(folder)) for folder in folders)
    assert weights_revision(first) != weights_revision(second)
    assert weights_revision(first, given="v7") == weights_revision(second, given="v7")
    assert weights_revision(first, given="v7") != weights_revision(first, given="v8")
    awq = model(str(folders[0]), quantization="awq")
    assert weights_revision(first, given="v7") != weights_revision(awq, given="v7")


def test_the_longest_name_still_fits_the_protocol() -> None:
    assert len(weights_revision(model(), given="w" * 128)) <= 128


@pytest.mark.parametrize("given", ["", "v7"])
def test_dummy_weights_are_no_models(given) -> None:
    real = weights_revision(model(), given=given, load_format="safetensors")
    assert real == weights_revision(model(), given=given)
    assert real != weights_revision(model(), given=given, load_format="dummy")


def test_formats_of_one_byte_are_told_apart() -> None:
    formats = ["fp8", "fp8_e5m2", "fp8_inc"]
    assert len({kv_dtype("torch.uint8", name) for name in formats}) == len(formats)


def test_one_format_has_one_name() -> None:
    assert kv_dtype("torch.bfloat16", "bfloat16") == kv_dtype("torch.bfloat16", "auto")
    e4m3 = {kv_dtype("torch.uint8", name) for name in ("auto", "fp8", "fp8_e4m3")}
    assert len(e4m3) == 1, "the scheduler says auto where the worker found fp8 in the checkpoint"
