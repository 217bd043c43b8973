"""What the demo promises; each promise is measured, and a broken one is the demo's exit status."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from demo.traffic import Figures, Held

EDIT_SECONDS = 5.0
"""A policy edit is in force on all nodes so soon after `kubectl apply` began."""


@dataclass(frozen=True, slots=True)
class Promise:
    """One promise: in words, what was measured, and whether it holds."""

    what: str
    measured: str
    holds: bool


@dataclass(frozen=True, slots=True)
class Edit:
    """How the policy edits went.

    Attributes:
        seconds: of each, from before `kubectl apply` to the new revision reported by all nodes.
        before, after: pages held on each node just before the last one, and which of them were
            held after it; the engines held their breath, so that only the edit moved pages.
        boots_before, boots_after: of the agents, by node.
    """

    seconds: tuple[float, ...]
    before: Mapping[str, Held]
    after: Mapping[str, Held]
    boots_before: Mapping[str, str]
    boots_after: Mapping[str, str]


def judge(figures: Mapping[str, Figures], edit: Edit) -> list[Promise]:
    """The promises that a run can keep or break; the last one is about the end and comes later."""
    wrong = sum(one.wrong_bytes for one in figures.values())
    verified = sum(one.hits for one in figures.values())
    failed = sum(one.failed for one in figures.values())
    requests = sum(one.requests for one in figures.values())
    layers = {
        name: sum(getattr(one, name) for one in figures.values()) for name in ("l0", "l1", "l2")
    }
    held = sum(len(one.keys) for one in edit.before.values())
    lost = held - sum(len(one.keys) for one in edit.after.values())
    restarted = [n for n in edit.boots_before if edit.boots_before[n] != edit.boots_after[n]]
    return [
        Promise(
            "no wrong byte is ever served",
            f"{wrong} wrong bytes in {verified:,} verified pages",
            wrong == 0 and verified > 0,
        ),
        Promise("no request fails", f"{failed} of {requests:,}", failed == 0 and requests > 0),
        Promise(
            "every tier serves",
            ", ".join(f"{name.upper()} {count:,} hits" for name, count in layers.items()),
            all(layers.values()),
        ),
        Promise(
            f"a policy edit is in force everywhere within {EDIT_SECONDS:.0f} s",
            " and ".join(f"{one:.2f} s" for one in edit.seconds) + " from kubectl apply",
            len(edit.seconds) > 0 and max(edit.seconds) < EDIT_SECONDS,
        ),
        Promise(
            "an edit drops no page that still fits",
            f"{lost} of {held:,} pages dropped",
            lost == 0 and held > 0,
        ),
        Promise(
            "an edit restarts nobody",
            f"{len(restarted)} agents restarted",
            not restarted and all(edit.boots_before.values()),
        ),
    ]
