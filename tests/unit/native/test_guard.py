"""A file that is cut short under a mapping: the process lives, and the lost page is a miss."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from kvtier_agent import native
from kvtier_agent.cache.units import in_one_piece
from kvtier_agent.server.mapping import FileArena, UnmappedError
from kvtier_agent.server.protocol import ArenaInfo

pytestmark = pytest.mark.skipif(
    native.NATIVE is None, reason=f"without the extension: {native.WHY_NOT}"
)

PRELUDE = """
import faulthandler, mmap, os, signal, subprocess, sys
import numpy as np
from kvtier_agent import native
PAGE, PAGES = 1 << 16, 32
faulthandler.disable()

def mapping(path):
    with open(path, "w+b") as file:
        file.write(np.random.default_rng(0).bytes(PAGE * PAGES))
        file.flush()
        return mmap.mmap(file.fileno(), PAGE * PAGES, mmap.MAP_SHARED)

def cut(path, size):
    code = f"import os; os.truncate({path!r}, {size})"
    subprocess.run([sys.executable, "-c", code], check=True)
"""


def run(tmp_path: Path, body: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: what fails here dies."""
    code = PRELUDE + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "arena"), str(tmp_path / "other")],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_file_cut_while_pages_are_copied(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        path = sys.argv[1]
        memory = mapping(path)
        guard = native.guard(memory)
        offsets = np.arange(PAGES, dtype=np.uint64) * np.uint64(PAGE)
        out = np.zeros(PAGE * PAGES, np.uint8)
        copy = lambda: native.copier.copy(memory, offsets, out, offsets, PAGE, private="target")
        good = copy()
        assert guard.faults == 0
        code = f"import os; os.truncate({path!r}, {3 * PAGE + 100})"
        child = subprocess.Popen([sys.executable, "-c", code])
        while child.poll() is None:
            copy()
        assert child.returncode == 0
        sums = copy()
        assert (sums[:3] == good[:3]).all()
        assert (sums[3:] != good[3:]).all()
        assert not out[4 * PAGE :].any()
        lost = (PAGES - 3) * PAGE // mmap.PAGESIZE - 1
        assert guard.faults == lost, (guard.faults, lost)
        copy()
        memory[10 * PAGE] = 1
        assert guard.faults == lost
        guard.close()
        guard.close()
        assert guard.faults == lost
        del guard
        print("alive")
        """,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "alive"), done.stderr


def test_numpy_and_other_threads_are_guarded_too(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        import threading
        memory = mapping(sys.argv[1])
        guard = native.guard(memory)
        view = np.frombuffer(memory, np.uint8)
        cut(sys.argv[1], 0)
        threads = [
            threading.Thread(target=lambda i=i: view[i * PAGE : (i + 1) * PAGE].sum())
            for i in range(8)
        ]
        [t.start() for t in threads]
        [t.join() for t in threads]
        view[20 * PAGE :] = 7
        assert int(view[20 * PAGE]) == 7
        assert guard.faults == 20 * PAGE // mmap.PAGESIZE
        print("alive")
        """,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "alive"), done.stderr


def test_an_arena_of_the_agent_that_a_client_cuts_short(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        from pathlib import Path
        from kvtier_agent.cache.arena import ShmArena
        arena = ShmArena(Path(sys.argv[1]), PAGE * PAGES)
        arena.back_first(PAGE * PAGES)
        arena.bytes[:] = 1
        assert arena.lost_pages == 0
        cut(sys.argv[1], 0)
        rows = np.take(arena.rows(PAGE), [3, 5], axis=0)
        assert not rows.any()
        assert arena.lost_pages == 2 * PAGE // mmap.PAGESIZE
        arena.close()
        print("alive")
        """,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "alive"), done.stderr


@pytest.mark.parametrize(
    "ending",
    [
        pytest.param("other[0]", id="another mapping"),
        pytest.param("guard.close(); memory[PAGE]", id="a guard that was closed"),
        pytest.param("os.kill(os.getpid(), signal.SIGBUS)", id="a signal sent"),
    ],
)
def test_every_other_bus_error_kills_as_before(tmp_path: Path, ending: str) -> None:
    done = run(
        tmp_path,
        f"""
        memory, other = mapping(sys.argv[1]), mapping(sys.argv[2])
        guard = native.guard(memory)
        cut(sys.argv[1], 0)
        cut(sys.argv[2], 0)
        memory[5]
        assert guard.faults == 1
        print("so far", flush=True)
        {ending}
        print("too far")
        """,
    )
    assert (done.returncode, done.stdout.strip()) == (-signal.SIGBUS, "so far"), done.stderr


def test_a_handler_that_was_there_before_is_called(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        caught = []
        signal.signal(signal.SIGBUS, lambda *_: caught.append(1))
        memory = mapping(sys.argv[1])
        guard = native.guard(memory)
        cut(sys.argv[1], 0)
        memory[5]
        assert not caught
        os.kill(os.getpid(), signal.SIGBUS)
        assert caught
        print("alive")
        """,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "alive"), done.stderr


def test_a_fault_handler_still_prints_where(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        faulthandler.enable()
        memory, other = mapping(sys.argv[1]), mapping(sys.argv[2])
        guard = native.guard(memory)
        cut(sys.argv[2], 0)
        other[0]
        """,
    )
    assert done.returncode == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in done.stderr


def test_threads_that_guard_and_let_go_do_not_wait_for_each_other(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        import threading
        from kvtier_agent.cache.aligned_map import map_shared
        fd = os.memfd_create("arena")
        os.ftruncate(fd, 64 << 20)

        def again():
            for _ in range(300):
                memory = map_shared(fd, 64 << 20)
                guard = native.guard(memory)
                memory[:: 1 << 20] = 1
                del memory
                del guard

        threads = [threading.Thread(target=again, daemon=True) for _ in range(8)]
        [t.start() for t in threads]
        [t.join(50) for t in threads]
        assert not any(t.is_alive() for t in threads)
        print("alive", flush=True)
        """,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "alive"), done.stderr


def test_a_read_only_mapping_is_refused() -> None:
    with pytest.raises(ValueError, match="writable"):
        native.NATIVE.Guard(bytes(4096))


def test_a_client_whose_arena_is_cut_short_has_misses_and_connects_anew() -> None:
    length, pages = 1 << 16, 4
    descriptor = os.memfd_create("arena")
    os.ftruncate(descriptor, length * pages)
    info = ArenaInfo(tier=1, kind="shm", size_bytes=length * pages)
    arena, form = FileArena(info, os.dup(descriptor)), in_one_piece(length)
    data = np.random.default_rng(0).integers(0, 256, (pages, length), dtype=np.uint8)
    rows = np.arange(pages, dtype=np.uint64)
    offsets = rows * np.uint64(length)
    stored = arena.write(offsets, form, data.data.cast("B"), rows)
    os.ftruncate(descriptor, length)
    os.close(descriptor)
    out = np.zeros_like(data)
    read = arena.read(offsets, form, out.data.cast("B"), rows)
    assert (read == stored).tolist() == [True, False, False, False]
    with pytest.raises(UnmappedError, match="cut short"):
        arena.read(offsets[:1], form, out.data.cast("B"), rows[:1])
