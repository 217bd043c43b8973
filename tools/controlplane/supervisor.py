"""Run one program, and end it when whoever asked for it is gone, however they went.

A process that is killed with SIGKILL cannot clean up, so somebody else has to notice. Asking the
kernel (``PR_SET_PDEATHSIG``) is not enough by itself: that signal is sent when the *thread* that
forked ends, which in a test run need not be the main one, and it may only be asked for between
fork and exec, where a process with threads can deadlock. So a small process with one thread stands
between the two:

    launcher ──pipe──► supervisor ──PDEATHSIG──► etcd, kube-apiserver, ...

* The launcher holds the write end of a pipe that is the supervisor's standard input. The kernel
  closes it when the launcher ends, and the supervisor ends its child: SIGTERM, and SIGKILL when
  the grace period is over. A ``K`` written into the pipe means SIGKILL at once.
* A copy of the write end in a forked child of the launcher would keep the pipe open. Therefore the
  supervisor also looks, twice a second, whether its parent is still the one it started with.
* If the supervisor itself is killed, the kernel kills the child: the supervisor has one thread,
  so here the signal means what it says. (Linux only; elsewhere that last case is not covered.)

It leads a session of its own, so that Ctrl-C in a terminal reaches the launcher alone, which then
stops its programs in order. It ends with the child's exit status, 128 + n for signal n.

Usage: ``python supervisor.py GRACE_SECONDS PROGRAM [ARGUMENT...]``. Imports nothing of the package,
so that it starts in some 20 ms with ``python -I -S``.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
LOOK_SECONDS = 0.5


def _die_with_parent(parent: int) -> None:
    """Between fork and exec of the child: ask to be killed when the supervisor ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        # It ended before we asked.
        os._exit(127)


def main(arguments: list[str]) -> int:
    grace, command = float(arguments[0]), arguments[1:]
    launcher = os.getppid()
    me = os.getpid()

    # A signal that arrives writes a byte into this pipe, which ends the select below.
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(woken)
    asked: list[int] = []
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _: asked.append(received))

    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, preexec_fn=lambda: _die_with_parent(me)
        )
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr, flush=True)
        return 126

    deadline = None
    watched = [0, wake]
    while child.poll() is None:
        readable, _, _ = select.select(watched, [], [], LOOK_SECONDS)
        if wake in readable:
            os.read(wake, 4096)
        if 0 in readable:
            order = os.read(0, 1)
            if order == b"K":
                child.kill()
            elif not order:
                watched.remove(0)
                asked.append(0)
        if deadline is None and (asked or os.getppid() != launcher):
            child.terminate()
            deadline = time.monotonic() + grace
        if deadline is not None and time.monotonic() >= deadline:
            child.kill()
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
