"""A signal is never lost, whatever the process is about and however many come."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest
from kvtier_agent.node.signals import Signals

TERM, HUP, USR = signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1


@pytest.fixture
def signals() -> Iterator[Signals]:
    made = Signals((TERM, HUP))
    yield made
    made.close()


def test_one_that_comes_before_anybody_waits_is_kept(signals: Signals) -> None:
    os.kill(os.getpid(), HUP)
    os.kill(os.getpid(), TERM)
    assert [signals.wait(), signals.wait()] == [HUP, TERM]


def test_one_that_another_thread_receives_ends_the_wait(signals: Signals) -> None:
    """As the kernel hands it out when the main thread is not to be had."""
    ready = threading.Event()

    def receive() -> None:
        ready.wait(10)
        signal.pthread_kill(threading.get_ident(), TERM)

    receiver = threading.Thread(target=receive)
    receiver.start()
    ready.set()
    assert signals.wait() == TERM
    receiver.join(10)


def test_those_of_others_end_nothing(signals: Signals) -> None:
    seen = []
    before = signal.signal(USR, lambda *_: seen.append("usr"))
    try:
        os.kill(os.getpid(), USR)
        os.kill(os.getpid(), TERM)
        assert signals.wait() == TERM
        assert seen == ["usr"]
    finally:
        signal.signal(USR, before)


def test_more_than_a_pipe_holds_stop_nobody(signals: Signals) -> None:
    for _ in range(70_000):
        signal.raise_signal(HUP)
    assert signals.wait() == HUP


def test_what_was_before_comes_back() -> None:
    before = signal.getsignal(TERM)
    made = Signals((TERM,))
    assert signal.getsignal(TERM) is not before
    made.close()
    assert signal.getsignal(TERM) is before
    assert signal.set_wakeup_fd(-1) == -1
