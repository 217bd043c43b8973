"""The hand on the cache: puts revisions in force, live, and knows what is.

One loop, on its own thread. Sources (`watch`, `standalone`) call `say` from their threads with the
newest word; the loop steps the lifecycle, plans budgets from fresh facts, and works the tiers in
two moves: `prepare` (may take seconds: memory is backed, volumes are opened; nothing in force
changes, and it may fail), then `reconfigure` (on the cache thread, cannot fail for lack of
anything). So a revision is in force entirely or not at all.

Besides words, two things make it act: a revision that was refused is tried again now and then, for
a missing volume may be mounted by somebody; and facts drift (an engine registers its pool, another
user of shared memory comes or goes), so budgets are planned anew and put in force when they differ
by more than `DRIFT_PERCENT`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Protocol

import structlog
from kvtier_api.policy import RevisionSpec
from kvtier_api.reasons import Reason

from kvtier_agent.cache.settings import Behaviour, BehaviourError
from kvtier_agent.node import lifecycle
from kvtier_agent.node.budgets import NodeBudgets, NotApplicableError, plan
from kvtier_agent.node.desired import Absent, Desired, Problem, Unheard, Wanted
from kvtier_agent.node.facts import Facts
from kvtier_agent.node.lifecycle import Action, Phase
from kvtier_agent.node.revision import NOTHING, behaviour_of
from kvtier_agent.node.view import NodeView
from kvtier_agent.supervise import Heart

__all__ = ["Control", "Tiers"]

TURN_SECONDS: Final = 0.5
RETRY_SECONDS: Final = 5.0
"""Between two tries of a refused revision, and between two looks at the facts; by default."""
DRIFT_PERCENT: Final = 5
STUCK_SECONDS: Final = 30.0
"""A turn may take so long without a sign of life. Memory for large arenas is had in steps, and
pages on large drives are found again piece by piece and file by file, each a sign of life; what has
none is a call to a drive, which is waited for a third of this at most."""

Said = tuple[Desired, Problem | None, int]
"""What is wanted, what was wrong with the newest word about it, its generation."""

log = structlog.get_logger(__name__)


class Tiers(Protocol):
    """What `Control` works: all trust domains' caches as one."""

    def prepare(
        self, behaviour: Behaviour, budgets: NodeBudgets, progress: Callable[[], None]
    ) -> None:
        """Makes room, which may take minutes: calls `progress` after each step. Raises
        `NotApplicableError`; what is in force is untouched then."""

    def reconfigure(self, behaviour: Behaviour, budgets: NodeBudgets) -> None:
        """Puts a prepared revision in force, live."""

    def drop(self) -> None:
        """Drops every page that nobody holds, also what an earlier process left."""


class Control:
    """See the module. ``measure``: fresh facts, from the control thread. ``keep``: called with
    each revision that came into force, to keep it on disk; its failure is its own to report."""

    def __init__(
        self,
        tiers: Tiers,
        measure: Callable[[], Facts],
        *,
        keep: Callable[[Wanted], None] = lambda _: None,
        look_seconds: float = RETRY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tiers = tiers
        self._measure = measure
        self._keep = keep
        self._look_seconds = look_seconds
        self._clock = clock
        self._wake = threading.Event()
        self._said: Said = (Unheard(), None, -1)
        self._life = lifecycle.START
        self._spec: RevisionSpec | None = None
        self._refusal: Problem | None = None
        self._budgets: NodeBudgets | None = None
        self._look_at = 0.0
        self._live: Callable[[], None] = lambda: None
        self.view = NodeView()
        """Replaced as a whole after each turn; read it from any thread."""
        self.changed: Callable[[], None] = lambda: None
        """Called after a turn that changed the view."""

    # ---- from other threads

    def say(self, desired: Desired | None, problem: Problem | None, generation: int = -1) -> None:
        """The newest word. ``desired`` None: it could not be understood (``problem`` says why),
        and what was wanted before stands."""
        self._said = (self._said[0] if desired is None else desired, problem, generation)
        self._wake.set()

    def stop_admitting(self) -> None:
        """The process is about to end: take nothing more in, and say so."""
        self.view = replace(self.view, stopping=True)
        if self._spec is not None and self._budgets is not None:
            self._tiers.reconfigure(behaviour_of(self._spec, admitting=False), self._budgets)

    # ---- the loop

    def run(self, heart: Heart) -> None:
        """Until the heart is asked to stop."""
        self._live = heart.live
        while not heart.stopping.is_set():
            heart.beat()
            with heart.allowing(STUCK_SECONDS):
                self.turn(self._clock())
            self._wake.wait(TURN_SECONDS)
            self._wake.clear()

    def resume(self, wanted: Wanted | None, grace_left: float | None) -> None:
        """Before the first turn: the last good revision as found on disk, and what was left of an
        orphan's grace (0: it was over). It is in force until a source speaks; after the grace
        nothing is."""
        now = self._clock()
        if wanted is not None and grace_left != 0:
            self._apply(wanted, now, admitting=grace_left is None)
        if grace_left is not None:
            # Also where it could not be applied: what is in memory keeps the rest of its grace.
            self._said = (Absent(grace_left), None, -1)
            in_force = self._life.in_force
            self._life = replace(lifecycle.resumed(grace_left, now), in_force=in_force)
        elif wanted is not None:
            self._said = (wanted, None, -1)
        self._publish(self._said, now)

    def turn(self, now: float) -> None:
        """One look at what is wanted, and what follows from it."""
        said = self._said  # once: what comes meanwhile was not tried yet, and is the next turn's
        desired = said[0]
        if now >= self._look_at:
            self._look_at = now + self._look_seconds
            self._look_again(desired)
        life, actions = lifecycle.step(self._life, desired, now)
        if isinstance(desired, Wanted):
            if Action.APPLY in actions:
                self._apply(desired, now)
        elif not isinstance(desired, Absent) or self._let_go(actions):
            self._life = life  # not before it is done: else it would not be asked for again
        if isinstance(desired, Absent) and self._life.phase in (Phase.DROPPED, Phase.WAITING):
            # What was pinned when the grace ended; what an earlier process left in memory.
            self._tiers.drop()
        self._publish(said, now)

    def _let_go(self, actions: tuple[Action, ...]) -> bool:
        """What follows from there being no policy. False: it could not be done, and is to be tried
        again."""
        try:
            for action in actions:
                self._stop_admitting() if action is Action.STOP_ADMITTING else self._drop()
        except NotApplicableError as e:
            problem = Problem(e.reason, e.message)
            if problem != self._refusal:
                log.error("what no policy asks for is not given up yet", problem=e.message)
            self._refusal = problem
            return False
        self._refusal = None
        return True

    def _look_again(self, desired: Desired) -> None:
        """A refused revision is tried again, and drifted facts lead to new budgets."""
        if self._refusal is not None and isinstance(desired, Wanted):
            self._life = replace(self._life, settled=None)
            return
        if self._life.phase is not Phase.SERVING or self._spec is None or self._budgets is None:
            return
        try:
            budgets = plan(self._spec, self._measure(), self._budgets)
            if not budgets.differs(self._budgets, DRIFT_PERCENT):
                return
            behaviour = behaviour_of(self._spec)
            self._tiers.prepare(behaviour, budgets, self._live)
            self._tiers.reconfigure(behaviour, budgets)
        except NotApplicableError as e:
            log.warning("what is in force cannot be held to", problem=e.message)
            self._refusal = Problem(e.reason, e.message)
            return
        say = log.warning if budgets.clamps else log.info
        say(
            "budgets changed", l0=budgets.l0, l1=budgets.l1, l2=budgets.l2,
            clamped=[str(c) for c in budgets.clamps],
        )  # fmt: skip
        self._budgets = budgets

    def _apply(self, wanted: Wanted, now: float, *, admitting: bool = True) -> None:
        started = self._clock()
        try:
            budgets = plan(wanted.spec, self._measure(), self._budgets)
            behaviour = behaviour_of(wanted.spec, admitting=admitting)
            self._tiers.prepare(behaviour, budgets, self._live)
            self._tiers.reconfigure(behaviour, budgets)
        except (NotApplicableError, BehaviourError) as e:
            reason = e.reason if isinstance(e, NotApplicableError) else Reason.InvalidRevision
            problem = Problem(reason, str(e))
            if problem != self._refusal:
                said = {"revision": wanted.revision[:10], "problem": problem.message}
                if self._life.in_force:
                    event = "revision cannot be applied; the last good one stays in force"
                    log.error(event, in_force=self._life.in_force[:10], **said)
                else:
                    log.error("revision cannot be applied, and none is in force", **said)
            self._refusal = problem
            self._life = lifecycle.refused(self._life, wanted)
            self._look_at = now + self._look_seconds
            return
        self._life = lifecycle.applied(self._life, wanted)
        self._spec, self._budgets, self._refusal = wanted.spec, budgets, None
        say = log.warning if budgets.clamps else log.info
        say(
            "revision in force",
            revision=wanted.revision[:10],
            policy=wanted.policy,
            l0=budgets.l0,
            l1=budgets.l1,
            l2=budgets.l2,
            clamped=[str(c) for c in budgets.clamps],
            seconds=round(self._clock() - started, 3),
        )
        self._keep(wanted)

    def _stop_admitting(self) -> None:
        log.warning("no policy rules this node; serving what is held, admitting nothing")
        if self._spec is not None and self._budgets is not None:
            self._tiers.reconfigure(behaviour_of(self._spec, admitting=False), self._budgets)

    def _drop(self) -> None:
        log.warning("the grace without a policy is over; dropping every page")
        self._tiers.drop()
        if self._spec is not None:
            behaviour = behaviour_of(self._spec, admitting=False)
            self._tiers.prepare(behaviour, NOTHING, self._live)
            self._tiers.reconfigure(behaviour, NOTHING)
        self._budgets = None

    def _publish(self, said: Said, now: float) -> None:
        desired, problem, generation = said
        view = NodeView(
            at=now,
            life=self._life,
            heard=not isinstance(desired, Unheard),
            generation=generation,
            policy=desired.policy if isinstance(desired, Wanted) else "",
            wanted=desired.revision if isinstance(desired, Wanted) else "",
            refusal=problem or self._refusal,
            budgets=self._budgets,
            stopping=self.view.stopping,
        )
        same = replace(view, at=self.view.at) == self.view
        self.view = view
        if not same:
            self.changed()
