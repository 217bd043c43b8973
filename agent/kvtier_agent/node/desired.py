"""What ought to be in force, as the two sources of policy (Kubernetes, a file) say it.

A closed set of immutable words, so that the rest of ``node`` does not know which source spoke:
`Unheard`, `Absent`, `Wanted`. A source replaces the whole word; nobody edits one.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier_api.policy import RevisionSpec
from kvtier_api.reasons import Reason

__all__ = ["Absent", "Desired", "Problem", "Unheard", "Wanted"]


@dataclass(frozen=True, slots=True)
class Unheard:
    """Nobody has spoken yet."""


@dataclass(frozen=True, slots=True)
class Absent:
    """There is no policy for this node. ``grace_seconds``: how long bytes are still served."""

    grace_seconds: float
    observed_generation: int = -1


@dataclass(frozen=True, slots=True)
class Wanted:
    """This revision ought to be in force. ``policy`` is a name for people."""

    revision: str
    spec: RevisionSpec
    policy: str = ""
    observed_generation: int = -1

    @property
    def fingerprint(self) -> str:
        """What makes two of these the same work: the revision alone."""
        return self.revision


Desired = Unheard | Absent | Wanted


@dataclass(frozen=True, slots=True)
class Problem:
    """Why the newest word of a source could not be understood; what was said before stands."""

    reason: Reason
    message: str
    observed_generation: int = -1
