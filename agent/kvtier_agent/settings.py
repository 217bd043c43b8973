"""Every knob of one agent process: name, unit, default, bounds and meaning, said once.

`kvtier agent --help`, the environment variables (``KVTIER_AGENT_`` + the name in capitals) and the
reference in the docs all come from this class. What belongs to the cache's behaviour is not here
but in the policy; these are the facts of one machine: folders, devices, sockets, deadlines.

Precedence: command line, then environment, then default.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AliasChoices, BeforeValidator, Field, JsonValue, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from kvtier_agent.setting_values import Domain, HttpAddress, VolumeMapping, one_folder
from kvtier_agent.units import Bytes

__all__ = ["AgentSettings", "Domain", "HttpAddress", "VolumeMapping"]

ENV_PREFIX: Final = "KVTIER_AGENT_"
_LONGEST_SOCKET_PATH: Final = 100
"""Linux takes 107 bytes; the longest name of ours is added to the folder."""


def _each(parse: Any) -> Any:
    """A validator for a list given as a list, or as one string with commas (environment)."""

    def read(value: Any) -> Any:
        items = value.split(",") if isinstance(value, str) else value
        return tuple(parse(i.strip()) if isinstance(i, str) else i for i in items)

    return BeforeValidator(read)


def _one(parse: Any) -> Any:
    return BeforeValidator(lambda v: parse(v) if isinstance(v, str) else v)


def default_run_dir() -> Path:
    """``/run/kvtier`` for root, else a folder of the user's that goes with the session."""
    if os.geteuid() == 0:
        return Path("/run/kvtier")
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "kvtier" if base else Path(f"/tmp/kvtier-{os.getuid()}")  # noqa: S108


def default_state_dir() -> Path:
    """``/var/lib/kvtier`` for root, else under the user's state folder."""
    if os.geteuid() == 0:
        return Path("/var/lib/kvtier")
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "kvtier"


def _knob(
    default: Any,
    text: str,
    *,
    group: str,
    unit: str = "",
    shown: str = "",
    metavar: str = "",
    **more: Any,
) -> Any:
    """A setting. ``shown`` stands for the default where that depends on the machine."""
    extra: dict[str, JsonValue] = {"unit": unit, "shown": shown, "group": group, "metavar": metavar}
    key = "default_factory" if callable(default) else "default"
    return Field(description=text, json_schema_extra=extra, **{key: default}, **more)


_SOURCE, _PLACES, _DEVICE = "Policy source", "Folders and sockets", "Memory and devices"
_LIMITS, _COSTS, _OUTPUT = "Limits and deadlines", "Costs before they are measured", "Output"


class AgentSettings(BaseSettings):
    """Settings of ``kvtier agent``. Immutable; a mistake raises pydantic's ValidationError."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="forbid", populate_by_name=True
    )

    # ---- where the policy comes from
    policy: Path | None = _knob(
        None,
        "Run alone, under the KVTierPolicy in this file. It is reread when it changes and on "
        "SIGHUP. Give this or a node name; of both the file holds",
        group=_SOURCE,
    )
    node_name: str | None = _knob(
        None,
        "Run under Kubernetes, under the KVTierNode of this name. NODE_NAME in the environment "
        "does the same",
        group=_SOURCE,
        pattern=r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$",
        max_length=253,
        validation_alias=AliasChoices(f"{ENV_PREFIX}NODE_NAME", "NODE_NAME"),
    )
    kubeconfig: Path | None = _knob(
        None,
        "Credentials for the API server",
        shown="the Pod's service account",
        group=_SOURCE,
    )
    poll_seconds: float = _knob(
        1.0, "How often the policy file is looked at", unit="seconds", group=_SOURCE, ge=0.1, le=60
    )
    look_seconds: float = _knob(
        5.0,
        "Between two looks at what the machine has (room on volumes and in memory, what engines "
        "registered), and between two tries of a revision that was refused",
        unit="seconds",
        group=_SOURCE,
        ge=0.2,
        le=300,
    )
    save_seconds: float = _knob(
        5.0,
        "Between two times that counters are kept on disk and status.json is written; what is "
        "urgent is written at once",
        unit="seconds",
        group=_SOURCE,
        ge=0.2,
        le=60,
    )

    # ---- folders and sockets
    run_dir: Path = _knob(
        default_run_dir,
        "Sockets and page tables; one agent per folder",
        shown="/run/kvtier; without root $XDG_RUNTIME_DIR/kvtier or /tmp/kvtier-UID",
        group=_PLACES,
    )
    shm_dir: Path = _knob(
        Path("/dev/shm"),  # noqa: S108 - it is where shared memory is
        "Shared-memory filesystem that holds the arenas",
        group=_PLACES,
    )
    state_dir: Path = _knob(
        default_state_dir,
        "What outlives a restart: last good revision, counters",
        shown="/var/lib/kvtier; without root $XDG_STATE_HOME/kvtier or ~/.local/state/kvtier",
        group=_PLACES,
    )
    volume: Annotated[tuple[VolumeMapping, ...], NoDecode, _each(VolumeMapping.parse)] = _knob(
        (),
        "Where a volume that policies name is mounted. Repeat it for each; commas in the "
        "environment",
        metavar="NAME=DIR",
        shown="none",
        group=_PLACES,
        max_length=16,
    )
    allow_root_filesystem: bool = _knob(
        False,
        "Let a volume lie on the root filesystem or an overlay, which a full tier would fill "
        "for everybody. For trials on one machine",
        group=_PLACES,
    )
    domain: Annotated[tuple[Domain, ...], NoDecode, _each(Domain.parse)] = _knob(
        (Domain("default"),),
        "A trust domain, with its own socket (NAME.sock), arena and share of the tiers; GID may "
        "connect. Repeat it for each; commas in the environment",
        metavar="NAME:GID",
        shown="default",
        group=_PLACES,
        min_length=1,
        max_length=16,
    )
    http: Annotated[HttpAddress, NoDecode, _one(HttpAddress.parse)] = _knob(
        HttpAddress("127.0.0.1", 9476),
        "Where /healthz, /readyz and /metrics are served. Port 0 takes a free one",
        metavar="HOST:PORT",
        group=_PLACES,
    )

    # ---- memory and devices
    device: Literal["auto", "cpu", "cuda"] = _knob(
        "auto", "Where L0 lives. auto: cuda where there is one, else cpu", group=_DEVICE
    )
    device_memory: Bytes = _knob(
        2 << 30,
        "Stands for the device's memory where there is no device; percentOfDevice is taken of it",
        unit="quantity",
        group=_DEVICE,
        ge=1 << 20,
        le=1 << 50,
    )
    l0: Literal["owned", "engine"] = _knob(
        "owned",
        "Shape of L0. owned: an arena of the agent's, all of it on the first device that it sees. "
        "engine: the engine's own block pool, as for vLLM",
        group=_DEVICE,
    )
    memory_headroom: Bytes = _knob(
        2 << 30,
        "Part of the memory limit that is left to the agent's own heap and buffers",
        unit="quantity",
        group=_DEVICE,
        ge=64 << 20,
        le=1 << 40,
    )

    memory_on_stop: Literal["keep", "free"] = _knob(
        "keep",
        "What becomes of the DRAM tier's pages at an orderly stop. keep: they stay in shared "
        "memory, where the next agent finds them. free: the memory is given back",
        group=_DEVICE,
    )
    scrub_percent: int = _knob(
        10,
        "Share of one core's time for reading pages that were taken over from the agent before, "
        "to find damaged ones early",
        unit="percent",
        group=_LIMITS,
        ge=1,
        le=100,
    )

    journal_log_percent: int = _knob(
        25,
        "Size of an NVMe volume's log, in percent of its last checkpoint, at which the next "
        "checkpoint is written. Less: a shorter recovery, more bytes written",
        unit="percent",
        group=_LIMITS,
        ge=5,
        le=100,
    )

    # ---- limits and deadlines
    lease_seconds: float = _knob(
        30.0,
        "A lease or half-written put that is not given back by then is taken back",
        unit="seconds",
        group=_LIMITS,
        ge=1,
        le=3600,
    )
    pin_seconds: float = _knob(
        60.0,
        "The pins of a client of which nothing was heard for so long end; clients of this release "
        "give signs of life by themselves",
        unit="seconds",
        group=_LIMITS,
        ge=1,
        le=3600,
    )
    pin_percent: int = _knob(
        25,
        "Share of L0 and of L1 that clients may pin, all together; 0 refuses every pin",
        unit="percent",
        group=_LIMITS,
        ge=0,
        le=90,
    )
    max_pins: int = _knob(
        16_384, "Pages that one client may pin", unit="pages", group=_LIMITS, ge=0, le=1_000_000
    )
    max_clients: int = _knob(
        256, "Clients per trust domain", unit="clients", group=_LIMITS, ge=1, le=10_000
    )
    max_keys: int = _knob(
        65_536, "Pages that one call may name", unit="pages", group=_LIMITS, ge=1, le=1 << 20
    )
    max_pages: int = _knob(
        1 << 24,
        "Pages that a trust domain's page table may grow to, at 128 bytes each",
        unit="pages",
        group=_LIMITS,
        ge=1024,
        le=1 << 28,
    )
    write_queue: Bytes = _knob(
        256 << 20,
        "Bytes that may wait to be written to NVMe; past 90 % of it pages wait in L1, and where L1 "
        "needs slots its coldest are dropped",
        unit="quantity",
        group=_LIMITS,
        ge=1 << 20,
        le=64 << 30,
    )
    nvme_in_flight: Bytes = _knob(
        64 << 20,
        "Bytes that a drive of the NVMe tier has under way at most, where there is io_uring; trust "
        "domains share them",
        unit="quantity",
        group=_LIMITS,
        ge=1 << 20,
        le=64 << 30,
    )
    compaction_rate: Bytes = _knob(
        128 << 20,
        "Bytes per second that compaction of NVMe may write; they count as writes like any other, "
        "0 drops pages instead of moving them; trust domains share it",
        unit="quantity per second",
        group=_LIMITS,
        ge=0,
        le=1 << 40,
    )
    compaction_hot_percent: int = _knob(
        80,
        "A page of an NVMe segment that is emptied is moved, not dropped, if it is among so many "
        "percent of the tier's most recently touched pages; more is a higher hit rate and more "
        "writes",
        unit="percent",
        group=_LIMITS,
        ge=0,
        le=90,
    )
    recompute_tokens_per_second: float = _knob(
        20_000.0,
        "Prefill speed assumed until an engine reports its own",
        unit="tokens per second",
        group=_COSTS,
        ge=1,
        le=1e9,
    )
    stop_seconds: float = _knob(
        8.0,
        "How long an orderly stop may take before the process ends anyway",
        unit="seconds",
        group=_LIMITS,
        ge=1,
        le=60,
    )

    # ---- output
    log_level: Literal["debug", "info", "warning", "error"] = _knob(
        "info", "Least severe line that is written", group=_OUTPUT
    )
    log_format: Literal["json", "text"] = _knob(
        "json", "json: one object a line. text: for people", group=_OUTPUT
    )

    @model_validator(mode="after")
    def _fit_together(self) -> AgentSettings:
        if self.policy is None and self.node_name is None:
            raise ValueError(
                "say where the policy comes from: --policy FILE to run alone, or --node-name NAME "
                "to run under Kubernetes"
            )
        if self.kubeconfig is not None and self.policy is not None:
            raise ValueError("--kubeconfig goes with --node-name; leave it or --policy out")
        for what, names in (
            ("volume", [v.name for v in self.volume]),
            ("domain", [d.name for d in self.domain]),
        ):
            twice = sorted({n for n in names if names.count(n) > 1})
            if twice:
                raise ValueError(f"{what} {twice[0]} is given twice; give each name once")
        for one, other in itertools.combinations(self.volume, 2):
            if one_folder(one.path, other.path):
                raise ValueError(
                    f"--volume: {one.name} and {other.name} are one folder, {other.path}; give"
                    " each a folder of its own"
                )
        longest = self.run_dir / f"{max((d.name for d in self.domain), key=len)}.sock"
        if len(os.fsencode(longest)) > _LONGEST_SOCKET_PATH:
            raise ValueError(
                f"--run-dir {self.run_dir} is too long for a Unix socket; choose a path of at "
                f"most {_LONGEST_SOCKET_PATH - len(longest.name) - 1} bytes"
            )
        return self

    @property
    def standalone(self) -> bool:
        """A policy file wins over a node name that the environment happens to carry."""
        return self.policy is not None
