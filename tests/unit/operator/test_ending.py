"""The process ends within a bound, also where its tasks do not want to."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import textwrap

from kvtier_operator.runtime.ending import Backstop, end_tasks


async def test_a_task_that_swallows_cancellations_is_cancelled_again() -> None:
    swallowed = 0

    async def stubborn() -> None:
        nonlocal swallowed
        while swallowed < 3:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                swallowed += 1
        await asyncio.Event().wait()

    async def fails() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise RuntimeError("while ending")

    tasks = [asyncio.create_task(stubborn()), asyncio.create_task(fails())]
    await asyncio.sleep(0)
    assert await end_tasks(tasks, within=60) == set()
    assert swallowed == 3
    assert tasks[0].cancelled()


async def test_what_never_ends_is_named_and_left() -> None:
    free = False

    async def immortal() -> None:
        while not free:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    task = asyncio.create_task(immortal())
    await asyncio.sleep(0)
    assert await end_tasks([task], within=0.3) == {task}
    free = True
    await end_tasks([task], within=60)
    assert task.done()


IMMORTAL = """
    import asyncio, contextlib
    from kvtier_operator.logs import configure
    from kvtier_operator.runtime.ending import Backstop, end_tasks

    async def immortal():
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    async def main(backstop):
        task = asyncio.create_task(immortal())
        await asyncio.sleep(0)
        backstop.arm(7)
        await end_tasks([task], within=0.2)

    configure()
    asyncio.run(main(Backstop(seconds=1.0)))  # which waits for all tasks, for ever
"""


def test_the_backstop_ends_a_process_whose_tasks_do_not_end() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(IMMORTAL)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 7
    assert "do not end" in ended.stderr


async def test_a_disarmed_backstop_does_nothing() -> None:
    left: list[int] = []
    backstop = Backstop(seconds=0.05, leave=left.append)
    backstop.disarm()  # never armed
    backstop.arm(1)
    backstop.disarm()
    await asyncio.sleep(0.2)
    assert left == []
