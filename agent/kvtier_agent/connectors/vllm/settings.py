"""Every key of `kv_connector_extra_config` that is kvtier's: unit, default, bounds and meaning.

docs/user/engines.md has the same table. Keys that do not begin with `kvtier.` belong to somebody
else and are left alone; an unknown one that does is a typo, and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Final

PREFIX: Final = "kvtier."
MIB: Final = 1 << 20
FAILURE_POLICY: Final = "recompute"


class SettingsError(ValueError):
    """A flag that this connector cannot work with; the message says what to write."""


def _text(default: str, *, least: int, most: int) -> Any:
    """least, most: characters."""
    return field(default=default, metadata={"kind": "text", "least": least, "most": most})


def _whole(default: int | None, *, least: int, most: int) -> Any:
    return field(default=default, metadata={"kind": "whole", "least": least, "most": most})


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """Immutable; each field is the key `kvtier.` + its name."""

    socket: str = _text("/run/kvtier/default.sock", least=1, most=1024)
    """The agent's socket."""
    page_tokens: int | None = _whole(None, least=1, most=1 << 20)
    """Tokens of a page, 1 to 2^20, a multiple of vLLM's block. Default: the largest multiple of the
    block up to 256, or one block."""
    tenant: str = _text("", least=0, most=63)
    """For whom the pages count, up to 63 characters; none by default."""
    weights: str = _text("", least=0, most=128)
    """Name of the weights, up to 128 characters, in place of what the connector makes out from
    folder and files. Whoever gives it vouches that equal names are equal weights."""
    timeout_milliseconds: int = _whole(1000, least=1, most=600_000)
    """Longest wait for one answer of the agent, milliseconds, 1 to 600,000."""
    group_mebibytes: int = _whole(64, least=1, most=4096)
    """Pages are loaded and saved in groups of at most so many MiB (at least one page), through one
    buffer in host memory of that size, 1 to 4096."""
    load_timeout_milliseconds: int = _whole(1000, least=1, most=60_000)
    """Longest wait for one group of pages to come up from NVMe, milliseconds, 1 to 60,000."""
    step_timeout_milliseconds: int = _whole(10_000, least=1, most=120_000)
    """Longest wait for all loads before one forward pass, milliseconds, 1 to 120,000: the other
    requests of the batch wait too."""

    @property
    def timeout_seconds(self) -> float:
        return self.timeout_milliseconds / 1000

    @property
    def load_timeout_seconds(self) -> float:
        return self.load_timeout_milliseconds / 1000

    @property
    def step_timeout_seconds(self) -> float:
        return self.step_timeout_milliseconds / 1000

    @property
    def group_bytes(self) -> int:
        return self.group_mebibytes * MIB


KEYS: Final = tuple(PREFIX + knob.name for knob in fields(ConnectorSettings))


def read_settings(extra: Mapping[str, Any]) -> ConnectorSettings:
    """The settings in `kv_connector_extra_config`; raises SettingsError."""
    for key in extra:
        if str(key).startswith(PREFIX) and key not in KEYS:
            near = get_close_matches(str(key), KEYS, 1)
            hint = f"write {near[0]}" if near else f"the keys are {', '.join(KEYS)}"
            raise SettingsError(f"kv_connector_extra_config has an unknown key {key}; {hint}")
    given: dict[str, Any] = {
        knob.name: _value(PREFIX + knob.name, extra[PREFIX + knob.name], knob.metadata)
        for knob in fields(ConnectorSettings)
        if extra.get(PREFIX + knob.name) is not None
    }
    return ConnectorSettings(**given)


def _value(key: str, value: Any, knob: Mapping[str, Any]) -> str | int:
    least, most = knob["least"], knob["most"]
    if knob["kind"] == "text":
        if not isinstance(value, str) or not least <= len(value) <= most:
            raise SettingsError(f"{key} is {value!r}; write text of {least} to {most} characters")
        return value
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= most:
        raise SettingsError(f"{key} is {value!r}; write a whole number from {least} to {most}")
    return number


def check_failure_policy(transfer_config: Any) -> None:
    """Raises SettingsError where a page that cannot be loaded would end its request.

    Nothing holds a page between the scheduler's question and the worker's load: it may be evicted,
    late or damaged, or the agent may restart. That has to mean "compute it".
    """
    policy = getattr(transfer_config, "kv_load_failure_policy", FAILURE_POLICY)
    if policy != FAILURE_POLICY:
        raise SettingsError(
            f"kv_load_failure_policy is {policy!r} (vLLM's default is 'fail'): a page that is gone "
            'when it is to be loaded would end its request with an error. Write "kv_load_failure_'
            'policy": "recompute" into --kv-transfer-config, beside "kv_connector"'
        )
