"""Every knob of a benchmark: name, unit, default, bounds and meaning, said once.

`kvtier bench NAME --help`, the environment variables (``KVTIER_BENCH_`` + the name in capitals)
and the reference in the docs all come from these classes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, JsonValue, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from kvtier_agent.units import Bytes

MIB = 1 << 20


def _knob(default: Any, text: str, *, unit: str = "", shown: str = "", **bounds: Any) -> Any:
    extra: dict[str, JsonValue] = {"unit": unit, "shown": shown}
    return Field(default=default, description=text, json_schema_extra=extra, **bounds)


def _page(default: int) -> Any:
    return _knob(
        default, "Bytes of a page, a multiple of 4096", unit="quantity", ge=4096, le=64 * MIB
    )


def _volume() -> Any:
    return _knob(
        None,
        "Folder on the drive to measure. A folder of the run's own is made in it and removed",
        shown="the temporary folder",
    )


class BenchSettings(BaseSettings):
    """What every benchmark has. Immutable; a mistake raises pydantic's ValidationError."""

    model_config = SettingsConfigDict(env_prefix="KVTIER_BENCH_", frozen=True, extra="forbid")

    rounds: int = _knob(
        5, "Rounds; their order alternates, the median counts", unit="rounds", ge=1, le=100
    )

    @field_validator("page_bytes", check_fields=False)
    @classmethod
    def _aligned(cls, value: int) -> int:
        if value % 4096:
            raise ValueError(f"write a multiple of 4096, not {value}")
        return value

    @field_validator("volume", check_fields=False)
    @classmethod
    def _folder(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_dir():
            raise ValueError(f"{value} is no folder; make it first")
        return None if value is None else value.resolve()


class MemorySettings(BenchSettings):
    """Of `memory`."""

    page_bytes: Bytes = _page(MIB)
    pages: int = _knob(128, "Pages put and got in a round", unit="pages", ge=1, le=65_536)
    batch: int = _knob(32, "Pages of one call", unit="pages", ge=1, le=4096)


class LookupSettings(BenchSettings):
    """Of `lookup`."""

    keys: int = _knob(1024, "Keys of one lookup", unit="keys", ge=1, le=4096)
    pages: int = _knob(
        32_768, "Pages in the cache, 4096 bytes each", unit="pages", ge=1, le=1_000_000
    )
    calls: int = _knob(500, "Lookups of a round", unit="calls", ge=1, le=1_000_000)
    clients: int = _knob(
        4, "Clients that ask at once for the latency under load", unit="clients", ge=1, le=64
    )


class L2Settings(BenchSettings):
    """Of `l2`."""

    page_bytes: Bytes = _page(MIB)
    pages: int = _knob(2048, "Pages read and written in a round", unit="pages", ge=16, le=1 << 20)
    depth: int = _knob(32, "Pages in flight, over all clients", unit="pages", ge=1, le=256)
    clients: int = _knob(
        2, "Loads under way at once, an equal part of the depth each", unit="loads", ge=1, le=64
    )
    volume: Path | None = _volume()


class RecoverySettings(BenchSettings):
    """Of `recovery`."""

    pages: int = _knob(
        1_000_000, "Pages on the volume, 4096 bytes each", unit="pages", ge=1000, le=1_000_000
    )
    volume: Path | None = _volume()


class EndToEndSettings(BenchSettings):
    """Of `endtoend`."""

    page_bytes: Bytes = _page(MIB)
    page_tokens: int = _knob(256, "Tokens of a page", unit="tokens", ge=1, le=8192)
    prompt_tokens: int = _knob(8192, "Tokens of a prompt", unit="tokens", ge=1, le=1 << 20)
    prompts: int = _knob(8, "Prompts of a round", unit="prompts", ge=1, le=4096)
