"""Small builders for the agent's process: facts, revisions, and tiers that only remember."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from kvtier_agent.cache.settings import Behaviour
from kvtier_agent.node.budgets import NodeBudgets, NotApplicableError
from kvtier_agent.node.desired import Wanted
from kvtier_agent.node.facts import Device, Facts, MemoryLimit, VolumeFacts
from kvtier_api.policy import RevisionSpec
from kvtier_api.revision import revision_hash
from kvtier_api.validate import parse

GI = 1 << 30


@pytest.fixture
def revision() -> Callable[..., RevisionSpec]:
    """A revision from sections in YAML names; valueDensity.model is filled in."""

    def build(**sections: Any) -> RevisionSpec:
        return parse(RevisionSpec, {"valueDensity": {"model": "classic"}, **sections})

    return build


@pytest.fixture
def wanted(revision: Callable[..., RevisionSpec]) -> Callable[..., Wanted]:
    def build(**sections: Any) -> Wanted:
        spec = revision(**sections)
        return Wanted(revision_hash(spec), spec, "some-policy", 1)

    return build


@pytest.fixture
def facts() -> Callable[..., Facts]:
    """A roomy node with one 80Gi device and a volume, unless told otherwise."""

    def build(**changes: Any) -> Facts:
        given: dict[str, Any] = {
            "shape": "owned",
            "device": Device("cuda", (80 * GI,)),
            "memory": MemoryLimit(512 * GI, "the Pod's memory limit", 2 * GI),
            "shm_available": 512 * GI,
            "volumes": {"data0": VolumeFacts(total=4096 * GI, available=4096 * GI)},
            **changes,
        }
        return Facts(**given)

    return build


@dataclass
class RememberingTiers:
    """Stands for the caches: keeps what it was told, and can be told to refuse."""

    calls: list[str] = field(default_factory=list)
    behaviour: Behaviour | None = None
    budgets: NodeBudgets | None = None
    refuse: NotApplicableError | None = None
    drops: int = 0

    def prepare(
        self, behaviour: Behaviour, budgets: NodeBudgets, progress: Callable[[], None]
    ) -> None:
        self.calls.append("prepare")
        progress()
        if self.refuse is not None:
            raise self.refuse

    def reconfigure(self, behaviour: Behaviour, budgets: NodeBudgets) -> None:
        self.calls.append("reconfigure")
        self.behaviour, self.budgets = behaviour, budgets

    def drop(self) -> None:
        self.drops += 1


@pytest.fixture
def tiers() -> RememberingTiers:
    return RememberingTiers()
