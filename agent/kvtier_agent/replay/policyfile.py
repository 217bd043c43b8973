"""The policy of a replay's own agent: a file, or the one packaged here, with tiers by the page.

`--tier l0=N,l1=N,l2=N` says how many pages of the replay's size each tier holds and takes the place
of the policy's sizes; a tier that is not named keeps the policy's. 0 turns a tier off (L0 or L2;
L1 is where pages pass through and stays).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from kvtier_api import manifest
from kvtier_api.validate import validate

from kvtier_agent.cache.geometry import align_up
from kvtier_agent.cache.segment_sizes import bytes_for, slots_per_segment, slots_within
from kvtier_agent.replay.errors import ReplayError
from kvtier_agent.storage.journal_files import JournalSettings
from kvtier_agent.storage.segment import HEADER_BYTES

LEAST_TIER_BYTES = 1 << 20
"""The least size of a tier that the API admits."""


def parse_tiers(text: str) -> dict[str, int]:
    """`l0=300,l1=2000` -> {"l0": 300, "l1": 2000}; pages. Raises ReplayError."""
    tiers: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in ("l0", "l1", "l2") or not value.isascii() or not value.isdigit():
            raise ReplayError(f"--tier {text}: write l0=N,l1=N,l2=N with N in pages")
        if name in tiers:
            raise ReplayError(f"--tier {text}: {name} is named twice")
        tiers[name] = int(value)
    if tiers.get("l1") == 0:
        raise ReplayError("--tier l1=0: every page passes through L1; give it some pages")
    return tiers


def load_policy(path: Path | None) -> dict[str, Any]:
    """The one KVTierPolicy in a file (None: the packaged default), valid. Raises ReplayError."""
    name = "the packaged policy" if path is None else str(path)
    try:
        data = (
            resources.files("kvtier_agent.replay").joinpath("default_policy.yaml").read_bytes()
            if path is None
            else _read(path)
        )
        document = manifest.one(data)
    except OSError as error:
        raise ReplayError(f"--policy {name}: {error.strerror or error}") from None
    except manifest.ManifestError as error:
        raise ReplayError(f"--policy {name}: {error}") from None
    return _valid(document, f"--policy {name}")


def _read(path: Path) -> bytes:
    if path.exists() and not path.is_file():  # a pipe that nobody writes to would hold up the run
        raise ReplayError(f"--policy {path}: is no regular file; write the policy into one")
    return path.read_bytes()


def with_tiers(policy: Mapping[str, Any], tiers: Mapping[str, int], page_bytes: int) -> Any:
    """The policy with the sizes of these tiers (pages of `page_bytes`). Raises ReplayError."""
    changed: dict[str, Any] = copy.deepcopy(dict(policy))
    section = changed["spec"].setdefault("tiers", {})
    slot = align_up(page_bytes)
    for name, size, field in (
        ("l0", slot * tiers.get("l0", 0), "hbm"),
        ("l1", slot * tiers.get("l1", 0), "dram"),
        ("l2", l2_bytes(tiers.get("l2", 0), page_bytes), "nvme"),
    ):
        if name not in tiers:
            continue
        if not tiers[name]:
            # L0 is turned off by the agent's shape; the policy must still name a size.
            if field == "nvme":
                section.pop("nvme", None)
            continue
        if size < LEAST_TIER_BYTES:
            least = -(-LEAST_TIER_BYTES // slot)
            raise ReplayError(
                f"--tier {name}={tiers[name]}: {size} bytes is less than a tier can be; "
                f"write {name}={least} or more, or larger --page-bytes"
            )
        kept = section.get("nvme") or {} if field == "nvme" else {}
        section[field] = {**kept, "size": str(size)}
        if field == "nvme":
            section[field].setdefault("volumes", ["data0"])
    return _valid(changed, "the policy with --tier")


def l2_bytes(pages: int, page_bytes: int) -> int:
    """Bytes of L2 that hold this many pages: slots with their headers, what the file system needs
    for each segment file, and the journal."""
    stride = align_up(page_bytes) + HEADER_BYTES
    size = 0
    wanted = bytes_for(pages, stride)
    while size < wanted:
        size = wanted
        slots = slots_within(size, stride)
        aside = JournalSettings().space_bytes(slots, slots_per_segment(stride), 1, size)
        wanted = bytes_for(pages, stride) + aside
    return size


def _valid(policy: Any, name: str) -> dict[str, Any]:
    problems = validate(policy)
    if not problems and policy.get("kind") != "KVTierPolicy":
        raise ReplayError(f"{name}: write kind: KVTierPolicy")
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ReplayError(f"{name}: {problems[0]}{more}")
    return dict(policy)
