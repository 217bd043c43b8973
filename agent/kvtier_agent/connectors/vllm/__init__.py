"""kvtier for vLLM; see `connector` for the one flag that an engine needs.

`KvtierConnector` is found here by name, but imported only when asked for: what plans loads and
saves (`plan`) is also used and tested where vLLM is not installed.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "KvtierConnector":
        from kvtier_agent.connectors.vllm.connector import KvtierConnector

        return KvtierConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
