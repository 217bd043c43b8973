"""What the KV of an engine depends on besides its tokens, as names: weights and KV dtype.

Two engines share a page only if these are equal, so they must differ wherever the bytes would mean
something else. Names only: no vLLM, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from kvtier_agent.cache.identity import frame

WEIGHT_FILES: Final = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "config.json")
NAME_CHARACTERS: Final = 80
"""Of the model's name that stay readable in `weights_revision`."""


def file_marks(folder: Path, kinds: Sequence[str]) -> tuple[str, ...]:
    """Name, size and time of change of each file of these kinds in a folder; raises OSError."""
    marks: list[str] = []
    for file in sorted({file for kind in kinds for file in folder.glob(kind)}):
        status = file.stat()
        marks += [file.name, str(status.st_size), str(status.st_mtime_ns)]
    return tuple(marks)


def weights_revision(model: Any, *, given: str = "", load_format: str = "auto") -> str:
    """Which weights these are, from vLLM's `ModelConfig`; at most 128 characters.

    A name alone does not say it: a branch moves, and a folder is written anew. So the commit that
    was resolved, whatever overrides the model's configuration, and name, size and time of change
    of each weight file in a folder are part of it.

    given: the user's own name of the weights (`kvtier.weights`). It takes the place of name, commit
    and files; quantisation and overrides, which the engine's flags say, count all the same.
    load_format: vLLM's; `dummy` weights are no model's.
    """
    overrides = getattr(model, "hf_overrides", None)
    options = [
        model.quantization or "none",
        repr(sorted(overrides.items())) if isinstance(overrides, dict) else "",
    ]
    if given:
        parts = ["kvtier.weights", given, *options]
    else:
        commit = getattr(getattr(model, "hf_config", None), "_commit_hash", None)
        parts = [model.model, model.revision or "main", commit or "", *options]
        folder = Path(model.model)
        if folder.is_dir():
            parts += file_marks(folder, WEIGHT_FILES)
    if load_format == "dummy":
        parts.append("dummy")
    data = frame(b"W", *(str(part).encode() for part in parts))
    name = given or str(model.model)
    return f"{name[-NAME_CHARACTERS:]}@{blake2b(data, digest_size=16).hexdigest()}"


def kv_dtype(dtype: str, cache_dtype: str) -> str:
    """Name of the format in which KV is held.

    dtype: of the tensors. Quantised formats share one (all of fp8 is `torch.uint8`), so vLLM's name
    of the format counts beside it, unless it is the usual one of that dtype. For fp8 that is e4m3,
    and `auto` may mean it: vLLM's worker finds in the checkpoint what its scheduler never hears of,
    and both must come to one name.
    """
    usual = ("auto", "fp8", "fp8_e4m3", dtype.removeprefix("torch."))
    return dtype if cache_dtype in usual else f"{dtype}/{cache_dtype}"
