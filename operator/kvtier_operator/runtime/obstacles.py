"""What keeps the watches from being heard, said once and counted, and how long to wait each time.

Several watches meet the same obstacle at the same time (a token that was refused, an API server
that is away), so lines are counted by what they say and not by who met it: the first is logged at
once, the next after `REPEAT_SECONDS` with the number of attempts in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["Obstacle", "Obstacles", "obstacle_of"]

FIRST_SECONDS: Final = 0.5
MAX_SECONDS: Final = 5.0
REPEAT_SECONDS: Final = 300.0
MAX_SENTENCE: Final = 500


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a request was not granted. ``refused``: the credentials or rights do not suffice, which
    nobody but a person mends. ``retry_after``: seconds that the server asks for."""

    sentence: str
    refused: bool = False
    retry_after: float = 0.0


def obstacle_of(
    what: str, code: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> Obstacle | None:
    """What an answer to ``what`` ("watch nodes") says is in the way; None for one that waiting
    does not change. ``body``: the Status object, or {}."""
    message = str(body.get("message") or "").strip()
    if code == 401:
        return Obstacle(
            "the API server refuses the operator's token or certificate (401 Unauthorized): it has"
            " expired, or its ServiceAccount was deleted; give valid credentials",
            refused=True,
        )
    if code == 403:
        said = f": {message}" if message else ""
        text = f"the right to {what} is missing (403 Forbidden){said}; grant it, as the chart does"
        return Obstacle(text[:MAX_SENTENCE], refused=True)
    if code == 429 or code >= 500:
        details = body.get("details") or {}
        asked = (headers or {}).get("Retry-After") or details.get("retryAfterSeconds") or 0
        said = f": {message}" if message else ""
        text = f"the API server cannot answer at present (HTTP {code}){said}"
        return Obstacle(text[:MAX_SENTENCE], retry_after=_seconds(asked))
    return None


class Obstacles:
    """``clock``: monotonic seconds. ``say(event, **fields)`` logs a warning, ``tell`` an info."""

    def __init__(
        self, clock: Callable[[], float], say: Callable[..., object], tell: Callable[..., object]
    ) -> None:
        self._clock = clock
        self._say = say
        self._tell = tell
        self._met: dict[str, tuple[Obstacle, int]] = {}
        """By what was asked for: what is in the way, and how often in a row."""
        self._said: dict[str, tuple[float, int]] = {}
        """By sentence: when it was logged last, and how often it was met since."""
        self.final = ""
        """The last answer that no waiting changes; "" while there was none."""

    @property
    def refused(self) -> tuple[str, ...]:
        """What is refused at present for want of credentials or rights, each once."""
        return tuple(sorted({o.sentence for o, _ in self._met.values() if o.refused}))

    def met(self, what: str, obstacle: Obstacle) -> float:
        """``what`` was not granted; seconds to wait before the next attempt."""
        _, times = self._met.get(what, (obstacle, 0))
        self._met[what] = (obstacle, times + 1)
        self._log(obstacle.sentence)
        return max(obstacle.retry_after, min(MAX_SECONDS, FIRST_SECONDS * 2.0 ** min(times, 10)))

    def granted(self, what: str) -> None:
        """``what`` was answered."""
        if self._met.pop(what, None) is None or self._met:
            return
        self._said.clear()
        self._tell("the API server answers again", asked=what)

    def ended(self, what: str, code: int, message: str) -> None:
        """``what`` got an answer that no waiting changes."""
        said = f": {message}" if message else ""
        hint = "; was the CRD removed?" if code == 404 else ""
        self.final = f"the API server answers HTTP {code} to {what}{said}{hint}"[:MAX_SENTENCE]

    def _log(self, sentence: str) -> None:
        now = self._clock()
        at, since = self._said.get(sentence, (float("-inf"), 0))
        if now - at < REPEAT_SECONDS:
            self._said[sentence] = (at, since + 1)
            return
        self._said[sentence] = (now, 0)
        self._say("waiting", obstacle=sentence, **({"times": since + 1} if since else {}))


def _seconds(value: object) -> float:
    try:
        return min(60.0, max(0.0, float(str(value))))
    except ValueError:
        return 0.0
