"""What every test run needs, whoever starts it."""

from __future__ import annotations

import signal

import leftovers
import pytest

# A shell that puts a run into the background (`make test &` in a script) has it start with SIGINT
# ignored, and so would everything the run starts: a command that a test interrupts would go on.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart(session: pytest.Session) -> None:
    """An earlier run that was killed left its folders in memory, which others need."""
    if not hasattr(session.config, "workerinput"):  # once, not in each worker
        leftovers.sweep()
