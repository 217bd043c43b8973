"""What the node has to say about itself at one moment: frozen, made by `control`, read by status,
health and logs on other threads."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier_agent.node.budgets import NodeBudgets
from kvtier_agent.node.desired import Problem
from kvtier_agent.node.lifecycle import START, Life

__all__ = ["NodeView"]


@dataclass(frozen=True, slots=True)
class NodeView:
    """``life``: where the policy is in its life. ``heard``: whether any source has spoken.
    ``wanted``: the revision asked for, "" if none. ``refusal``: why that one is not in force, or
    why the newest word could not be understood. ``budgets``: in force. ``at``: monotonic."""

    at: float = 0.0
    life: Life = START
    heard: bool = False
    generation: int = -1
    policy: str = ""
    wanted: str = ""
    refusal: Problem | None = None
    budgets: NodeBudgets | None = None
    stopping: bool = False
    causes: tuple[str, ...] = field(default=())
    """One line for each loop that is not alive."""
    restarts: tuple[str, ...] = field(default=())
    """What was found of the process before, one line for each trust domain that found something."""

    cut: tuple[str, ...] = field(default=())
    """Tiers whose shared memory a client cut short, in words."""

    rival: str = ""
    """Boot id of another agent that reports under this node's name, empty while there is none."""

    unkept: str = ""
    """Why the agent's state cannot be written to disk, empty while it can."""

    @property
    def in_force(self) -> str:
        return self.life.in_force or ""
