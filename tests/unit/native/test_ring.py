"""Rings of io_uring against preadv and pwritev, on a real file."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import resource
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvtier_agent import native
from kvtier_agent.native import COMPLETION, FLUSH, READ, TRANSFER_COLUMNS, WRITE

PAGE = 4096
ARENA = 4 << 20
FILE = 16 << 20


def _why_not() -> str:
    if native.NATIVE is None:
        return f"without the extension: {native.WHY_NOT}"
    try:
        native.ring(bytearray(PAGE)).close(5)
    except OSError as error:
        return f"no io_uring here: {error}"
    return ""


pytestmark = pytest.mark.skipif(bool(_why_not()), reason=_why_not())


def row(**columns: int) -> list[int]:
    return [columns.get(name, 0) for name in TRANSFER_COLUMNS]


class Harness:
    """A ring over fresh memory; every completion it has handed out, by tag."""

    def __init__(self, **settings: Any) -> None:
        self.memory = mmap.mmap(-1, ARENA)
        self.headers = mmap.mmap(-1, 64 * PAGE)
        self.arena = np.frombuffer(self.memory, np.uint8)
        self.heads = np.frombuffer(self.headers, np.uint8)
        self.ring = native.ring(self.memory, self.headers, **settings)
        self.results: dict[int, int] = {}

    def submit(self, *rows: list[int]) -> None:
        self.ring.submit(np.array(rows, np.uint64))

    def collect(self) -> None:
        for tag, result in np.frombuffer(self.ring.collect(), COMPLETION).tolist():
            assert tag not in self.results, "a tag completed twice"
            self.results[tag] = result

    def wait(self, *tags: int, seconds: float = 60) -> list[int]:
        """Their results, once they have all completed; woken by the event descriptor alone."""
        until = time.monotonic() + seconds
        while not self.results.keys() >= set(tags):
            left = until - time.monotonic()
            assert left > 0, f"{set(tags) - self.results.keys()} did not complete"
            assert select.select([self.ring], [], [], left)[0]
            self.collect()
        return [self.results[tag] for tag in tags]

    def started(self, n: int) -> None:
        """Returns when the kernel has n transfers."""
        until = time.monotonic() + 60
        while self.ring.in_flight != n:
            assert time.monotonic() < until, f"{self.ring.in_flight} in flight"
            time.sleep(0.001)


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    yield made
    assert made.ring.close(30) == 0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "segment"
    file.write_bytes(np.random.default_rng(1).bytes(FILE))
    return file


def open_direct(path: Path) -> int:
    """O_DIRECT where the file system has it."""
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)


@pytest.fixture
def file(path: Path) -> Iterator[int]:
    descriptor = open_direct(path)
    yield descriptor
    os.close(descriptor)


def disjoint(rng: Any, n: int, pages: int, most: int) -> list[tuple[int, int]]:
    """n runs (first, count) of pages that do not touch each other, in any order."""
    width = pages // n
    runs = [(i * width, int(rng.integers(1, min(width, most) + 1))) for i in range(n)]
    return [runs[i] for i in rng.permutation(n)]


def test_no_more_bytes_are_in_flight_than_a_drive_may_have(harness_of_pipes: Any) -> None:
    """Reads of empty pipes do not end: the kernel has as many as the bytes allow, and no more; when
    one ends the next begins."""
    harness, ends, numbers = harness_of_pipes
    for i, number in enumerate(numbers):
        harness.submit(row(operation=READ, file=number, offset=i * PAGE, length=PAGE, tag=i))
    most = harness.ring.in_flight
    until = time.monotonic() + 20
    for done in range(len(numbers)):
        while harness.ring.in_flight < min(3, len(numbers) - done):
            assert time.monotonic() < until, "fewer are in flight than may be"
            time.sleep(0.001)
        for _ in range(20):
            most = max(most, harness.ring.in_flight)
            time.sleep(0.001)
        os.write(ends[done], b"x" * PAGE)
        while len(harness.results) <= done:
            assert time.monotonic() < until, "a transfer never ended"
            for tag, result in np.frombuffer(harness.ring.collect(), COMPLETION).tolist():
                harness.results[tag] = result
    assert most == 3
    assert set(harness.results) == set(range(len(numbers)))


@pytest.fixture
def harness_of_pipes() -> Iterator[tuple[Harness, list[int], list[int]]]:
    """A ring that may have 3 pages in flight, the writing ends of 8 pipes, and their numbers."""
    harness = Harness(in_flight_bytes=3 * PAGE)
    pipes = [os.pipe() for _ in range(8)]
    yield harness, [end for _, end in pipes], [harness.ring.add_file(end) for end, _ in pipes]
    for _, end in pipes:
        os.close(end)
    harness.ring.close(5)
    for end, _ in pipes:
        os.close(end)


@pytest.mark.parametrize("pinned", [False, True], ids=["plain", "pinned"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"depth": 1}, {"depth": 3, "in_flight_bytes": 3 * PAGE}],
    ids=["deep", "one at a time", "few bytes"],
)
def test_random_batches_equal_preadv_and_pwritev(
    file: int, path: Path, settings: Any, pinned: bool
) -> None:
    harness = Harness(**settings)
    rng = np.random.default_rng(7)
    number = harness.ring.add_file(file)
    if pinned and harness.ring.pin(0, ARENA):
        pytest.skip("memory cannot be pinned here (RLIMIT_MEMLOCK)")
    oracle = bytearray(path.read_bytes())
    tag = 0
    for _ in range(12):
        harness.arena[:] = rng.integers(0, 256, ARENA, dtype=np.uint8)
        harness.heads[:] = rng.integers(0, 256, harness.heads.size, dtype=np.uint8)
        n = int(rng.integers(1, 40))
        places = disjoint(rng, n, ARENA // PAGE, 16)
        where = disjoint(rng, n, FILE // PAGE - 17, 1)  # rows of a batch run in any order
        rows, expected, tags = [], [], []
        before_arena, before_heads = harness.arena.copy(), harness.heads.copy()
        after_arena, after_heads = harness.arena.copy(), harness.heads.copy()
        for i, ((first, count), (spot, _)) in enumerate(zip(places, where, strict=True)):
            write, headed = bool(rng.integers(2)), bool(rng.integers(2))
            count = 0 if headed and rng.integers(4) == 0 else count
            head = PAGE if headed else 0
            at, length, total = spot * PAGE, count * PAGE, head + count * PAGE
            memory = slice(first * PAGE, first * PAGE + length)
            heads = slice(i * PAGE, i * PAGE + head)
            if write:
                oracle[at : at + total] = (
                    before_heads[heads].tobytes() + before_arena[memory].tobytes()
                )
            else:
                after_heads[heads] = np.frombuffer(oracle[at : at + head], np.uint8)
                after_arena[memory] = np.frombuffer(oracle[at + head : at + total], np.uint8)
            tag += 1
            tags.append(tag)
            expected.append(total)
            rows.append(
                row(operation=WRITE if write else READ, file=number, file_offset=at,
                    offset=first * PAGE, length=length, header_offset=i * PAGE,
                    header_length=head, tag=tag)
            )  # fmt: skip
        harness.submit(*rows)
        assert harness.wait(*tags) == expected
        assert np.array_equal(harness.arena, after_arena)
        assert np.array_equal(harness.heads, after_heads)
        assert path.read_bytes() == oracle
    assert tag > 50
    assert harness.ring.close(30) == 0


def test_a_thousand_transfers_from_several_threads(harness: Harness, file: int) -> None:
    number = harness.ring.add_file(file)

    def put(thread: int) -> None:
        for i in range(250):
            harness.submit(
                row(operation=READ, file=number, file_offset=(thread * 250 + i) * PAGE,
                    offset=(thread * 250 + i) % (ARENA // PAGE) * PAGE, length=PAGE,
                    tag=thread * 250 + i)
            )  # fmt: skip

    threads = [threading.Thread(target=put, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert harness.wait(*range(1000)) == [PAGE] * 1000
    assert harness.ring.in_flight == 0


def test_together_means_woken_once_when_the_last_has_ended(
    harness: Harness, pipe: tuple[int, int], file: int
) -> None:
    hanging, good = harness.ring.add_file(pipe[0]), harness.ring.add_file(file)
    rows = [row(file=good, offset=i * PAGE, length=PAGE, tag=i) for i in range(3)]
    rows.append(row(file=hanging, offset=3 * PAGE, length=PAGE, tag=3))
    harness.ring.submit(np.array(rows, np.uint64), together=True)
    harness.submit(row(file=good, offset=4 * PAGE, length=PAGE, tag=4))
    assert harness.wait(4) == [PAGE]  # and with it the others that have ended so far
    harness.started(1)
    assert not select.select([harness.ring], [], [], 0)[0]
    os.write(pipe[1], b"last")
    assert harness.wait(0, 1, 2, 3) == [PAGE, PAGE, PAGE, 4]
    harness.ring.submit(np.empty((0, len(TRANSFER_COLUMNS)), np.uint64), together=True)
    harness.ring.submit(np.array(rows[3:], np.uint64), together=True)
    harness.results.clear()
    harness.ring.cancel(np.array([3], np.uint64))
    assert harness.wait(3) == [-errno.ECANCELED]


def test_a_flush(harness: Harness, file: int) -> None:
    number = harness.ring.add_file(file)
    harness.submit(row(operation=FLUSH, file=number, tag=5))
    assert harness.wait(5) == [0]


def test_past_the_end_of_the_file_a_read_is_short(harness: Harness, file: int) -> None:
    number = harness.ring.add_file(file)
    harness.submit(
        row(file=number, file_offset=FILE - PAGE, length=4 * PAGE, tag=1),
        row(file=number, file_offset=FILE, offset=8 * PAGE, length=PAGE, tag=2),
        row(file=number, file_offset=FILE - PAGE, offset=16 * PAGE, length=2 * PAGE,
            header_length=PAGE, tag=3),
    )  # fmt: skip
    assert harness.wait(1, 2, 3) == [PAGE, 0, PAGE]


def test_the_kernels_errors_are_the_results(harness: Harness, path: Path) -> None:
    for mode, operation, expected in (
        (os.O_RDONLY, WRITE, errno.EBADF),
        (os.O_WRONLY, READ, errno.EBADF),
    ):
        descriptor = os.open(path, mode)
        number = harness.ring.add_file(descriptor)
        os.close(descriptor)
        harness.submit(row(operation=operation, file=number, length=PAGE, tag=operation))
        assert harness.wait(operation) == [-expected]
    folder = os.open(path.parent, os.O_RDONLY)
    number = harness.ring.add_file(folder)
    os.close(folder)
    harness.submit(row(file=number, length=PAGE, tag=10))
    assert harness.wait(10) == [-errno.EISDIR]


def test_an_unaligned_direct_transfer_fails_and_the_next_one_works(
    harness: Harness, file: int
) -> None:
    number = harness.ring.add_file(file)
    harness.submit(row(file=number, offset=1, length=PAGE, tag=1))
    direct = bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)
    assert harness.wait(1) in ([-errno.EINVAL], [PAGE]) if direct else [PAGE]
    harness.submit(row(file=number, length=PAGE, tag=2))
    assert harness.wait(2) == [PAGE]


def test_the_ring_has_its_own_descriptor_and_reuses_numbers_safely(
    harness: Harness, path: Path
) -> None:
    content = path.read_bytes()
    descriptor = os.open(path, os.O_RDONLY)
    number = harness.ring.add_file(descriptor)
    os.close(descriptor)
    harness.submit(row(file=number, length=PAGE, tag=1))
    assert harness.wait(1) == [PAGE]
    assert harness.arena[:PAGE].tobytes() == content[:PAGE]
    harness.ring.drop_file(number)
    with pytest.raises(IndexError, match="has no file"):
        harness.submit(row(file=number, length=PAGE, tag=2))
    with pytest.raises(IndexError, match="has no file"):
        harness.ring.drop_file(number)
    other = path.with_name("other")
    other.write_bytes(b"o" * PAGE)
    descriptor = os.open(other, os.O_RDONLY)
    assert harness.ring.add_file(descriptor) == number
    os.close(descriptor)
    harness.submit(row(file=number, length=PAGE, tag=3))
    assert harness.wait(3) == [PAGE]
    assert harness.arena[:PAGE].tobytes() == b"o" * PAGE


def test_too_many_files(path: Path) -> None:
    harness = Harness(files=2)
    with path.open("rb") as file:
        assert [harness.ring.add_file(file.fileno()) for _ in range(2)] == [0, 1]
        with pytest.raises(OSError, match="drop one first") as caught:
            harness.ring.add_file(file.fileno())
    assert caught.value.errno == errno.EMFILE
    with pytest.raises(OSError, match="Bad file descriptor"):
        harness.ring.add_file(-1)
    assert harness.ring.close(10) == 0


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        ({"operation": 3}, ValueError),
        ({"file": 1}, IndexError),
        ({"file": 1 << 40}, IndexError),
        ({"length": 0}, ValueError),
        ({"offset": ARENA - PAGE + 1}, IndexError),
        ({"offset": (1 << 64) - PAGE}, IndexError),
        ({"length": ARENA + PAGE}, IndexError),
        ({"length": 1 << 32}, ValueError),
        ({"length": (1 << 64) - 1}, ValueError),
        ({"file_offset": (1 << 63) - 10}, ValueError),
        ({"file_offset": (1 << 64) - 1}, ValueError),
        ({"header_offset": 64 * PAGE, "header_length": 1}, IndexError),
        ({"operation": FLUSH}, ValueError),
    ],
)
def test_a_row_that_makes_no_sense_is_refused_with_its_whole_batch(
    harness: Harness, file: int, columns: dict[str, int], kind: type[Exception]
) -> None:
    number = harness.ring.add_file(file)
    good = row(file=number, length=PAGE, tag=1)
    bad = row(**{"file": number, "length": PAGE, "tag": 2} | columns)
    with pytest.raises(kind):
        harness.submit(good, bad)
    harness.submit(row(file=number, length=PAGE, tag=3))
    assert harness.wait(3) == [PAGE]
    assert harness.results.keys() == {3}


def test_arguments_that_make_no_sense_are_refused(harness: Harness) -> None:
    for settings in ({"depth": 0}, {"depth": 5000}, {"files": 0}, {"queue": 0}):
        with pytest.raises(ValueError, match="write a number from 1 to"):
            native.ring(bytearray(PAGE), **settings)
    with pytest.raises(ValueError, match="writable"):
        native.ring(bytes(PAGE))
    with pytest.raises(ValueError, match="rows of 8"):
        harness.ring.submit(np.zeros(7, np.uint64))
    with pytest.raises(ValueError, match="uint64"):
        harness.ring.submit(np.zeros(8, np.int64))
    with pytest.raises(IndexError):
        harness.ring.pin(PAGE, ARENA)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A read from its first end hangs, as one from a dead drive does."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_a_full_queue_refuses(pipe: tuple[int, int]) -> None:
    harness = Harness(depth=1, queue=3)
    number = harness.ring.add_file(pipe[0])
    rows = [row(file=number, offset=i * PAGE, length=PAGE, tag=i) for i in range(3)]
    harness.submit(*rows)
    with pytest.raises(BlockingIOError, match="3 transfers are open"):
        harness.submit(row(file=number, length=PAGE, tag=9))
    harness.ring.cancel(np.arange(3, dtype=np.uint64))
    assert harness.wait(0, 1, 2) == [-errno.ECANCELED] * 3
    harness.submit(row(file=number, length=PAGE, tag=9))
    assert harness.ring.close(30) == 0
    assert harness.wait(9) == [-errno.ECANCELED]


def test_what_is_cancelled_completes_and_nothing_else(
    harness: Harness, pipe: tuple[int, int], file: int
) -> None:
    hanging, good = harness.ring.add_file(pipe[0]), harness.ring.add_file(file)
    harness.submit(row(file=hanging, length=PAGE, tag=1))
    harness.submit(row(file=hanging, offset=PAGE, length=PAGE, tag=2))
    harness.submit(row(file=good, offset=2 * PAGE, length=PAGE, tag=3))
    assert harness.wait(3) == [PAGE]
    harness.ring.cancel(np.array([1, 3, 77], np.uint64))
    assert harness.wait(1) == [-errno.ECANCELED]
    assert 2 not in harness.results
    os.write(pipe[1], b"late")
    assert harness.wait(2) == [4]
    assert harness.arena[PAGE : PAGE + 4].tobytes() == b"late"


def test_dropping_a_file_ends_what_waits_for_it(pipe: tuple[int, int], path: Path) -> None:
    harness = Harness(depth=1)
    number = harness.ring.add_file(pipe[0])
    harness.submit(*(row(file=number, offset=i * PAGE, length=PAGE, tag=i) for i in range(3)))
    harness.started(1)
    harness.ring.drop_file(number)
    assert harness.wait(1, 2) == [-errno.ECANCELED] * 2
    os.write(pipe[1], b"x")  # what the kernel has goes on
    assert harness.wait(0) == [1]
    assert harness.ring.close(30) == 0


def test_reads_go_before_writes_and_do_not_starve_them(path: Path, pipe: tuple[int, int]) -> None:
    """With one place, held by a read that hangs, the order of the rest is that of the queues."""
    harness = Harness(depth=1)
    hanging = harness.ring.add_file(pipe[0])
    with path.open("r+b") as file:
        number = harness.ring.add_file(file.fileno())
    harness.submit(row(file=hanging, length=1, tag=1000))
    harness.started(1)
    for i in range(3):
        harness.submit(row(operation=WRITE, file=number, offset=PAGE, length=PAGE, tag=100 + i))
    harness.submit(*(row(file=number, offset=2 * PAGE, length=PAGE, tag=i) for i in range(20)))
    os.write(pipe[1], b"x")
    harness.wait(*range(20), 100, 101, 102)
    assert list(harness.results) == [1000, *range(16), 100, *range(16, 20), 101, 102]
    assert harness.ring.close(30) == 0


def test_closing_while_reads_hang_does_not_block(pipe: tuple[int, int]) -> None:
    harness = Harness(depth=2)
    number = harness.ring.add_file(pipe[0])
    harness.submit(*(row(file=number, offset=i * PAGE, length=PAGE, tag=i) for i in range(4)))
    assert harness.ring.close(30) == 0  # a pipe can be cancelled
    assert harness.wait(0, 1, 2, 3) == [-errno.ECANCELED] * 4
    assert harness.ring.close(0) == 0
    for call in (
        lambda: harness.submit(row(file=number, length=PAGE)),
        lambda: harness.ring.add_file(pipe[0]),
        lambda: harness.ring.cancel(np.zeros(1, np.uint64)),
        lambda: harness.ring.pin(0, PAGE),
    ):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_a_storm_of_cancellations_is_survived(pipe: tuple[int, int], file: int) -> None:
    """Many more answers than the ring's queues hold."""
    harness = Harness(depth=8)
    hanging, good = harness.ring.add_file(pipe[0]), harness.ring.add_file(file)
    harness.submit(*(row(file=hanging, offset=i * PAGE, length=PAGE, tag=i) for i in range(8)))
    harness.started(8)
    everything = np.arange(8, dtype=np.uint64)
    for _ in range(500):
        harness.ring.cancel(everything)
    assert harness.wait(*range(8)) == [-errno.ECANCELED] * 8
    harness.submit(row(file=good, length=PAGE, tag=9))
    assert harness.wait(9) == [PAGE]
    assert harness.ring.close(30) == 0


def test_a_close_without_patience_says_what_is_left(pipe: tuple[int, int]) -> None:
    harness = Harness(depth=2)
    number = harness.ring.add_file(pipe[0])
    harness.submit(row(file=number, length=PAGE, tag=1))
    harness.started(1)
    assert harness.ring.close(0) in (0, 1)
    assert harness.wait(1) == [-errno.ECANCELED]
    assert harness.ring.close(30) == 0


def test_buffers_are_free_after_the_close_and_not_before(pipe: tuple[int, int]) -> None:
    memory = mmap.mmap(-1, ARENA)
    ring = native.ring(memory)
    number = ring.add_file(pipe[0])
    ring.submit(np.array([row(file=number, length=PAGE)], np.uint64))
    with pytest.raises(BufferError):
        memory.close()
    assert ring.close(30) == 0
    memory.close()


def test_a_ring_that_is_forgotten_ends_its_thread_and_its_descriptors(path: Path) -> None:
    def rings() -> int:
        return sum("io_uring" in link for link in _links())

    def once() -> None:
        ring = native.ring(mmap.mmap(-1, ARENA))
        with path.open("rb") as file:
            ring.submit(np.array([row(file=ring.add_file(file.fileno()), length=PAGE)], np.uint64))

    before = rings()
    for _ in range(5):
        once()
    gc.collect()
    until = time.monotonic() + 30
    while rings() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert rings() == before


def _links() -> list[str]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(entry.readlink()))
        except OSError:
            continue
    return found


def test_pinned_memory_is_given_back(harness: Harness, file: int) -> None:
    number = harness.ring.add_file(file)
    for _ in range(3):
        if harness.ring.pin(0, ARENA // 2):
            pytest.skip("memory cannot be pinned here (RLIMIT_MEMLOCK)")
        # Across the end of what is pinned, and behind it.
        for tag, offset in enumerate((0, ARENA // 2 - PAGE, ARENA // 2)):
            harness.submit(row(file=number, offset=offset, length=2 * PAGE, tag=tag))
        assert harness.wait(0, 1, 2) == [2 * PAGE] * 3
        harness.results.clear()
        harness.ring.unpin(0, ARENA)
    harness.submit(row(file=number, length=PAGE, tag=9))
    assert harness.wait(9) == [PAGE]


def test_without_memory_to_lock_transfers_still_work(path: Path) -> None:
    """Root may lock what it likes, so an ordinary user with a limit of nothing tries."""
    if os.geteuid() != 0:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
        if limit == resource.RLIM_INFINITY or limit > ARENA:
            pytest.skip("needs root, or a small RLIMIT_MEMLOCK")
    code = f"""
import errno, mmap, os, resource, select
import numpy as np
from kvtier_agent import native
file = os.open({str(path)!r}, os.O_RDONLY)
resource.setrlimit(resource.RLIMIT_MEMLOCK, ({ARENA // 4}, {ARENA // 4}))  # enough for the queues
if os.geteuid() == 0:
    os.setresuid(65534, 65534, 65534)
memory = mmap.mmap(-1, {ARENA})
ring = native.ring(memory)
assert ring.pin(0, {ARENA}) == errno.ENOMEM
ring.submit(np.array([[0, ring.add_file(file), 0, 0, 4096, 0, 0, 1]], np.uint64))
select.select([ring], [], [])
print(np.frombuffer(ring.collect(), native.COMPLETION).tolist(), ring.close(30))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[(1, 4096)] 0", done.stderr


def test_where_io_uring_is_refused_the_constructor_says_so() -> None:
    """As a seccomp profile does it: io_uring_setup answers EPERM."""
    code = """
import ctypes, struct, platform
from kvtier_agent import native
number = 425
# load the number of the system call; is it that one? then EPERM, else go on
program = struct.pack("<HBBI", 0x20, 0, 0, 0) + struct.pack("<HBBI", 0x15, 0, 1, number)
program += struct.pack("<HBBI", 0x06, 0, 0, 0x00050001)
program += struct.pack("<HBBI", 0x06, 0, 0, 0x7FFF0000)
memory = ctypes.create_string_buffer(program, len(program))
class Program(ctypes.Structure):
    _fields_ = [("n", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
filter = Program(4, ctypes.addressof(memory))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(filter), 0, 0) == 0
try:
    native.ring(bytearray(4096))
except OSError as error:
    print(error.errno, error.strerror)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    expected = "1 io_uring is forbidden here (seccomp profile, or kernel.io_uring_disabled)"
    assert done.stdout.strip() == expected, done.stderr
