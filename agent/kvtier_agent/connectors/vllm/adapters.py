"""LoRA adapters by their content: pages of an adapter that was trained again are other pages.

vLLM's block hash has an adapter's name and nothing of its weights, which is enough for a cache that
ends with the process. Here pages outlive it, so each adapter's pages hang from a root of their own,
made from path, name, size and time of change of its files.

Whose content cannot be told (no folder to look into, files that changed while the adapter was
loaded, an adapter that vLLM may read anew at any step) gets no root: its requests are computed.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from kvtier_agent.cache.identity import frame
from kvtier_agent.connectors.vllm.fingerprint import file_marks

log = logging.getLogger(__name__)

ADAPTER_FILES: Final = ("adapter_config.json", "*.safetensors", "*.bin", "*.pt")
MOST_ADAPTERS: Final = 10_000
"""Loaded adapters that are remembered; past it the one that was used longest ago is forgotten."""


def adapter_digest(path: str) -> bytes | None:
    """16 bytes that name the files of the adapter at `path`; None where there are none to see."""
    try:
        marks = file_marks(Path(path), ADAPTER_FILES) if path else ()
    except OSError:
        return None
    if not marks:
        return None
    return blake2b(
        frame(b"A", path.encode(), *(m.encode() for m in marks)), digest_size=16
    ).digest()


class Adapters:
    """The adapters that an engine has loaded. Lives on the scheduler's thread."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[int, str], bytes | None] = OrderedDict()

    def digest(self, lora: Any) -> bytes | None:
        """What a request's pages hang from, besides the model: b"" without an adapter, and None
        where nobody can tell what the adapter holds.

        lora: vLLM's `LoRARequest`, or None. A load of an adapter has a number (`lora_int_id`); what
        its files were when its first request came is taken for what was loaded.
        """
        if lora is None:
            return b""
        load = (int(lora.lora_int_id), str(lora.lora_path))
        now = None if _read_anew(lora) else adapter_digest(load[1])
        if load not in self._seen:
            self._seen[load] = now
            if len(self._seen) > MOST_ADAPTERS:
                self._seen.popitem(last=False)
            if now is None:
                self._tell(lora, "its files cannot be told apart from others of its name")
        self._seen.move_to_end(load)
        if self._seen[load] is not None and now != self._seen[load]:
            self._seen[load] = None
            self._tell(lora, "its files changed after it was loaded")
        return self._seen[load]

    def _tell(self, lora: Any, why: str) -> None:
        log.warning(
            "kvtier: requests of adapter %s (%s) are neither loaded nor saved: %s",
            lora.lora_name, lora.lora_path, why,
        )  # fmt: skip


def _read_anew(lora: Any) -> bool:
    """May the weights be others than those in the folder, or be read again at any step?"""
    return bool(
        getattr(lora, "load_inplace", False) or getattr(lora, "tensorizer_config_dict", None)
    )
