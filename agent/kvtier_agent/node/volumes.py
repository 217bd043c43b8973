"""The mapped volumes as facts: what their file systems say, and what became of writing to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from kvtier_agent.node import facts
from kvtier_agent.node.facts import VolumeFacts
from kvtier_agent.node.places import held_bytes
from kvtier_agent.storage.core import Core

__all__ = ["measure_volumes"]


def measure_volumes(
    mounts: Mapping[str, Path],
    domains: Iterable[str],
    cores: Iterable[Core],
    clock: Callable[[], float] = time.monotonic,
) -> tuple[dict[str, VolumeFacts], dict[str, str]]:
    """Facts by volume, and why a volume could not be looked at. `mounts`: where each is mounted;
    pages lie in ``<mount>/kvtier/<domain>/``. On the control thread: a volume that is left out is
    tried again here, so that the budgets which follow are right about it."""
    found: dict[str, VolumeFacts] = {}
    broken: dict[str, str] = {}
    domains, cores = tuple(domains), tuple(cores)
    for core in cores:
        core.try_volumes_again()
    for name, mount in mounts.items():
        try:
            found[name] = _measure(name, mount, domains, cores, clock())
        except OSError as e:
            broken[name] = f"{mount}: {e.strerror}"
    return found, broken


def _measure(
    name: str, mount: Path, domains: tuple[str, ...], cores: tuple[Core, ...], now: float
) -> VolumeFacts:
    troubles = [trouble for core in cores if (trouble := core.trouble(name)) is not None]
    failing = [t for t in troubles if t.reason == "VolumeUnusable"]
    measured = facts.volume_facts(
        mount,
        _held(name, mount, domains, cores, in_trouble=bool(troubles)),
        refuses=any(t.reason == "VolumeReadOnly" for t in troubles),
    )
    served = any(core.holds(name) for core in cores)
    return replace(
        measured,
        # What lies on a volume that could not be opened is served by nobody.
        held=measured.held if served or not (measured.read_only or troubles) else 0,
        failing=failing[0].message if failing else "",
        lost=any(t.given_up(now) for t in failing),
        full=any(t.reason == "VolumeFull" for t in troubles),
    )


def _held(
    name: str, mount: Path, domains: tuple[str, ...], cores: tuple[Core, ...], *, in_trouble: bool
) -> int:
    """Bytes of kvtier's own files on a volume. Raises OSError where they cannot be counted; of one
    that fails anyway the segments stand for them, so that it is judged by its failure."""
    try:
        return sum(held_bytes(mount / "kvtier" / domain) for domain in domains)
    except OSError:
        if not in_trouble:
            raise
        return sum(held for core in cores for its, held, _ in core.volumes() if its == name)
