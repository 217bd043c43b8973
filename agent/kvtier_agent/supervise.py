"""Supervised loops: nothing in the agent dies in silence.

Every background loop of the agent is a thread under one ``Supervisor``. A loop gets a ``Heart``
and beats it whenever it goes round; it ends when ``heart.stopping`` is set. What can go wrong, and
what then happens:

- it raises, or returns without being asked to: the error is kept and logged, health is red with
  the loop's name and that error, and the loop is started again after a back-off that doubles from
  0.1 s to 30 s (and starts over once a run has lasted longer than the back-off before it);
- it hangs: after ``stuck_seconds`` without a beat health is red with its name. A thread cannot be
  ended from outside, so that is all: the probe's failure makes the kubelet restart the agent. What
  may take longer, such as a batch on a slow drive, says so itself (``Heart.allowing``), so that the
  time it is given is not given to the rest of its loop;
- it was started again: health turns green once it has run for ``recover_seconds``.

``Supervisor.health`` only reads, from any thread, with the clock passed to the constructor.
``Supervisor.kill`` is how tests and drills end a loop: its next beat raises ``LoopKilledError``;
with ``Supervisor.hang`` its next beat does not return.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import structlog

log = structlog.get_logger("kvtier.supervise")

FIRST_BACKOFF_SECONDS: Final = 0.1
LAST_BACKOFF_SECONDS: Final = 30.0
STUCK_SECONDS: Final = 5.0
RECOVER_SECONDS: Final = 1.0


class LoopKilledError(Exception):
    """A test or a drill ended this loop with ``Supervisor.kill``."""


class LoopReturnedError(Exception):
    """A loop returned though nobody asked it to stop."""


class Heart:
    """What a loop holds of its supervisor: it beats, it waits, it asks whether to stop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.stopping = threading.Event()
        self._clock = clock
        self._last = clock()
        self._killed = threading.Event()
        self._allowed = 0.0
        self._moving = threading.Event()
        self._moving.set()
        self._stands = threading.Event()

    def beat(self) -> None:
        """The loop went round once; raises ``LoopKilledError`` when somebody killed it."""
        self.live()
        if not self._moving.is_set():
            self._stands.set()
            self._moving.wait()
        if self._killed.is_set():
            raise LoopKilledError("killed on request")

    def live(self) -> None:
        """A sign of life in the middle of a long round, where nothing may be cut short."""
        self._last = self._clock()

    @contextlib.contextmanager
    def allowing(self, seconds: float) -> Iterator[None]:
        """What is done inside may take so many seconds without a sign of life."""
        self.live()
        self._allowed = seconds
        try:
            yield
        finally:
            self.live()
            self._allowed = 0.0

    def wait(self, seconds: float, slice_seconds: float = 1.0) -> bool:
        """Sleep ``seconds``, beating meanwhile; True when the loop is asked to stop."""
        end = self._clock() + seconds
        while not self.stopping.is_set():
            self.beat()
            left = end - self._clock()
            if left <= 0:
                return False
            self.stopping.wait(min(left, slice_seconds))
        return True

    def age(self) -> float:
        """Seconds since the last beat."""
        return max(0.0, self._clock() - self._last)


def back_off(previous: float, lived: float) -> float:
    """Seconds to wait before a dead loop is started again.

    ``previous``: the wait before it, 0 before the first; ``lived``: seconds from start to death.
    Doubles up to ``LAST_BACKOFF_SECONDS`` while the loop dies sooner than it would have to wait.
    """
    doubled = min(LAST_BACKOFF_SECONDS, previous * 2) or FIRST_BACKOFF_SECONDS
    return FIRST_BACKOFF_SECONDS if lived > doubled else doubled


@dataclass(frozen=True)
class LoopHealth:
    """One loop as seen now; ``cause`` is empty when all is well."""

    name: str
    restarts: int
    beat_age_seconds: float
    cause: str

    @property
    def ok(self) -> bool:
        """True when the loop runs and beats."""
        return not self.cause


@dataclass
class _Loop:
    """A loop and its thread; written by its own thread, read by ``health``."""

    name: str
    target: Callable[[Heart], None]
    heart: Heart
    wake_up: Callable[[], None] | None = None
    restarts: int = 0
    down: bool = False
    down_at: float | None = None
    error: str = ""
    thread: threading.Thread | None = None
    wake: threading.Event = field(default_factory=threading.Event)


class Supervisor:
    """Starts, restarts and stops the agent's loops, and says how they are."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        stuck_seconds: float = STUCK_SECONDS,
        recover_seconds: float = RECOVER_SECONDS,
    ) -> None:
        self._clock = clock
        self._stuck_seconds = stuck_seconds
        self._recover_seconds = recover_seconds
        self._loops: dict[str, _Loop] = {}
        self._lock = threading.Lock()

    def start(
        self,
        name: str,
        target: Callable[[Heart], None],
        wake: Callable[[], None] | None = None,
    ) -> None:
        """Run ``target(heart)`` in a thread called ``name`` until ``stop``.

        ``wake`` ends a wait inside the loop, so that it sees at once that it is to stop.
        Raises ``ValueError`` when a loop of that name exists already.
        """
        loop = _Loop(name, target, Heart(self._clock), wake)
        with self._lock:
            if name in self._loops:
                raise ValueError(f"a loop named {name!r} runs already")
            self._loops[name] = loop
        loop.thread = threading.Thread(target=self._run, args=(loop,), name=name, daemon=True)
        loop.thread.start()

    def stop(self, timeout_seconds: float = 5.0, names: list[str] | None = None) -> list[str]:
        """Ask the loops to end (all, or those named) and wait; names of those still running."""
        with self._lock:
            loops = [x for x in self._loops.values() if names is None or x.name in names]
        for loop in loops:
            loop.heart.stopping.set()
            loop.heart._moving.set()
            loop.wake.set()
            if loop.wake_up is not None:
                loop.wake_up()
        end = time.monotonic() + timeout_seconds
        late: list[str] = []
        for loop in loops:
            thread = loop.thread
            if thread is None or thread is threading.current_thread():
                continue
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                late.append(loop.name)
        with self._lock:
            for loop in loops:
                if loop.name not in late:
                    self._loops.pop(loop.name, None)
        return late

    def names(self) -> list[str]:
        """The names of all loops, in the order of their start."""
        with self._lock:
            return list(self._loops)

    def health(self) -> list[LoopHealth]:
        """Every loop as it is now."""
        now = self._clock()
        with self._lock:
            loops = list(self._loops.values())
        return [LoopHealth(x.name, x.restarts, x.heart.age(), self._cause(x, now)) for x in loops]

    def causes(self) -> list[str]:
        """One line for each loop that is not well; empty when all are."""
        return [f"{x.name}: {x.cause}" for x in self.health() if not x.ok]

    def kill(self, name: str, hold: bool = False) -> None:
        """End the loop at its next beat; with ``hold`` every restart too, until ``revive``."""
        loop = self._loops[name]
        loop.heart._killed.set()
        if not hold:
            loop.wake.set()
            threading.Thread(target=self._release_when_down, args=(loop,), daemon=True).start()

    def hang(self, name: str) -> threading.Event:
        """Hold the loop at its next beat until ``revive``. The event is set when it stands."""
        heart = self._loops[name].heart
        heart._moving.clear()
        return heart._stands

    def revive(self, name: str) -> None:
        """Let a loop that was killed with ``hold`` start again at once, or one that hangs go on."""
        loop = self._loops[name]
        loop.heart._killed.clear()
        loop.heart._stands.clear()
        loop.heart._moving.set()
        loop.wake.set()

    def _release_when_down(self, loop: _Loop) -> None:
        while not loop.down and not loop.heart.stopping.is_set():
            time.sleep(0.005)
        loop.heart._killed.clear()

    def _cause(self, loop: _Loop, now: float) -> str:
        if loop.heart.stopping.is_set():
            return ""
        if loop.down:
            return f"died: {loop.error}"
        if loop.down_at is not None and now - loop.down_at < self._recover_seconds:
            return f"restarted, died before: {loop.error}"
        age = now - loop.heart._last
        if age > max(self._stuck_seconds, loop.heart._allowed):
            return f"stuck: no sign of life for {age:.1f} s"
        return ""

    def _run(self, loop: _Loop) -> None:
        backoff = 0.0
        while not loop.heart.stopping.is_set():
            started = self._clock()
            try:
                loop.heart.beat()
                loop.down = False
                loop.target(loop.heart)
                if loop.heart.stopping.is_set():
                    return
                raise LoopReturnedError("returned without being asked to stop")
            except BaseException as error:
                # BaseException on purpose: a loop that ends by SystemExit is as dead as any.
                if loop.heart.stopping.is_set() and not isinstance(error, Exception):
                    return
                loop.error = f"{type(error).__name__}: {error}"[:300]
                loop.down = True
                loop.down_at = self._clock()
                loop.restarts += 1
                backoff = back_off(backoff, self._clock() - started)
                expected = isinstance(error, LoopKilledError)
                log.error(
                    "loop died",
                    loop=loop.name,
                    error=loop.error,
                    restarts=loop.restarts,
                    backoff_seconds=round(backoff, 3),
                    exc_info=not expected,
                )
            # Jitter: loops that died of one cause do not all come back in the same instant.
            loop.wake.clear()
            loop.wake.wait(backoff * random.uniform(0.8, 1.2))  # noqa: S311
