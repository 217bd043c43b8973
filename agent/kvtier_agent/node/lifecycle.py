"""What the agent does as its policy comes, changes and goes.

The story. An agent knows three things about its policy, and they are not the same:

- *nothing was heard yet* (``UNHEARD``): the process is young and the API server has not answered,
  or no policy file could be read. It says nothing about what ought to be: the last good revision
  kept on disk is in force until somebody speaks.
- *there is none* (``Absent``): the node object says so, or is gone. The agent keeps serving what
  it holds and admits nothing. After ``grace`` seconds it drops its bytes, because memory that no
  policy asks for belongs to others.
- *this one* (``Wanted``): it is applied. If it cannot be, the last good one stays in force; if
  there is none yet, nothing is admitted, and the reason is said.

A policy that comes back within the grace finds every page where it was.

`step` is a pure function of (state, what is wanted, now): it returns the next state and what is to
be done. ``now`` is monotonic seconds, so a jump of the wall clock changes nothing. A restart does
not give an orphan a fresh grace: `remaining_grace` goes to disk, and `resumed` takes it up again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from kvtier_agent.node.desired import Absent, Desired, Unheard, Wanted

__all__ = ["Action", "Life", "Phase", "applied", "refused", "remaining_grace", "resumed", "step"]


class Phase(Enum):
    """Where the node is in the life of its policy."""

    WAITING = "Waiting"
    """No revision was ever in force here: nothing is held, nothing admitted."""
    SERVING = "Serving"
    """A revision is in force."""
    ORPHANED = "Orphaned"
    """The policy is gone: what is held is served, nothing is admitted."""
    DROPPED = "Dropped"
    """The grace is over and the bytes are gone."""


class Action(Enum):
    """What the caller has to do, in this order."""

    APPLY = "apply"
    """Put the wanted revision in force; then call `applied` or `refused`."""
    STOP_ADMITTING = "stop-admitting"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class Life:
    """The state between two steps. ``settled`` is the fingerprint of the wanted revision that was
    last tried, whether it came into force or was refused, so that it is tried once."""

    phase: Phase = Phase.WAITING
    in_force: str | None = None
    settled: str | None = None
    drop_at: float | None = None


START: Final = Life()
LEAST_GRACE_SECONDS: Final = 0.001
"""Left of a grace that is over while what it was for could not be dropped yet."""


def resumed(remaining_seconds: float | None, now: float) -> Life:
    """The state after a restart in the middle of an orphan's grace, or after it (0); None: it was
    not orphaned."""
    if remaining_seconds is None:
        return START
    if remaining_seconds <= 0:
        return Life(phase=Phase.DROPPED)
    return Life(phase=Phase.ORPHANED, drop_at=now + remaining_seconds)


def remaining_grace(life: Life, now: float) -> float | None:
    """Seconds of grace left, to be kept on disk; 0 once all is dropped, and not before. None where
    nothing is orphaned."""
    if life.phase is Phase.DROPPED:
        return 0.0
    if life.phase is not Phase.ORPHANED or life.drop_at is None:
        return None
    return max(LEAST_GRACE_SECONDS, life.drop_at - now)


def step(life: Life, desired: Desired, now: float) -> tuple[Life, tuple[Action, ...]]:
    """The next state and what to do. Idempotent: the same inputs again ask for nothing new."""
    match desired:
        case Unheard():
            return life, ()
        case Wanted() as wanted:
            if wanted.fingerprint == life.settled:
                return life, ()
            return life, (Action.APPLY,)
        case Absent(grace_seconds=grace):
            return _without_policy(life, grace, now)


def _without_policy(life: Life, grace: float, now: float) -> tuple[Life, tuple[Action, ...]]:
    if life.phase in (Phase.WAITING, Phase.DROPPED):
        return replace(life, settled=None), ()
    if life.phase is Phase.SERVING:
        orphan = Life(phase=Phase.ORPHANED, in_force=life.in_force, drop_at=now + grace)
        return orphan, (Action.STOP_ADMITTING,)
    assert life.drop_at is not None
    # A grace that was made shorter counts at once; one made longer does not revive the old clock.
    drop_at = min(life.drop_at, now + grace)
    if now >= drop_at:
        return Life(phase=Phase.DROPPED), (Action.DROP,)
    return replace(life, settled=None, drop_at=drop_at), ()


def applied(life: Life, wanted: Wanted) -> Life:
    """After APPLY succeeded: the wanted revision is in force."""
    return Life(phase=Phase.SERVING, in_force=wanted.revision, settled=wanted.fingerprint)


def refused(life: Life, wanted: Wanted) -> Life:
    """After APPLY failed: the last good revision stays, and this one is not tried again until it
    changes (or the facts it was refused for do: the caller then clears ``settled``)."""
    return replace(life, settled=wanted.fingerprint)
