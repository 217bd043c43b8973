"""`l2`: pages of one transfer unit through the agent to the drive and back, against fio.

*read*: clients load pages that are on the drive alone, a batch at a time, so that `depth` pages
are asked for at any moment, and check each page where it landed, in the arena that they map: one
more client than there are batches under way, so that one checks while the others wait.
*write*: a client puts new pages, a depth in each call and four depths ahead of the drive, into a
full DRAM tier; what counts is what the agent wrote to the drive in that time. Baseline: fio with
io_uring in its best setting, at the same depth and unit, on a file of the same size on the same
file system that was laid out before. `cpu_seconds_per_gb` is of the agent and the clients together,
checksums included.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.bench import fio
from kvtier_agent.bench.errors import BenchError
from kvtier_agent.bench.figures import Figure, Measure, Spread, alternate
from kvtier_agent.bench.settings import L2Settings
from kvtier_agent.bench.stand import PAGE_TOKENS, Sizes, Stand, random_keys, touched
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.server.client import AgentError, Client
from kvtier_agent.storage.volume import filesystem_of

GB: Final = 1e9
LOAD_MILLISECONDS: Final = 10_000
"""Deadline of one load: a page that is late would be a miss."""
SETTLE_SECONDS: Final = 60.0
"""How long the agent may take to write what was put."""
FIO_SECONDS: Final = 600.0
AHEAD_DEPTHS: Final = 4
"""Writes that wait at the drive while new pages are put: enough that it never waits for us."""
PACE_SECONDS: Final = 0.008
"""Between two looks at what waits: each costs the agent time that is charged to its writes."""
DRAM_DEPTHS: Final = 16
"""DRAM holds this many times what is in flight, or an eighth of a round's pages: at most half of it
may be on its way to the drive, and that is to be more than what waits there."""
_SLACK_BYTES: Final = 1 << 30
"""Room on the volume for segments that are half empty and for the file system's records."""


def sizes(settings: L2Settings) -> Sizes:
    """DRAM for what is in flight and not for the pages of a round: those come from the drive.
    Raises `BenchError` where that cannot be."""
    dram = max(DRAM_DEPTHS * settings.depth, settings.pages // 8)
    if settings.pages < 4 * dram:
        raise BenchError(
            f"{settings.pages} pages would stay in DRAM at a depth of {settings.depth}; "
            f"write at least --pages {4 * DRAM_DEPTHS * settings.depth}"
        )
    rounds = settings.rounds + 2
    return Sizes(
        dram=dram * settings.page_bytes,
        # Every round writes new pages; the tier replaces the oldest when it is full.
        nvme=(min(rounds, 3) * settings.pages + dram) * (settings.page_bytes + 4096) + _SLACK_BYTES,
    )


def geometry(settings: L2Settings) -> Geometry:
    return Geometry.of_page_bytes(settings.page_bytes, PAGE_TOKENS)


def batch_pages(settings: L2Settings) -> int:
    """Pages that one client asks for at a time."""
    return max(1, settings.depth // settings.clients)


def check_volume(folder: Path) -> None:
    """Raises `BenchError` where a folder is no place to measure a drive."""
    _, kind = filesystem_of(folder)
    if kind in ("tmpfs", "ramfs"):
        raise BenchError(f"--volume {folder} is memory ({kind}), not a drive; name another folder")


def run(stand: Stand, settings: L2Settings, say: Callable[[str], None]) -> list[Figure]:
    """Figures `read` and `write`. Raises `BenchError` and `AgentError`."""
    bench = _Drive(stand, settings)
    say(f"writing {settings.pages} pages of {settings.page_bytes} bytes")
    bench.fill()
    baseline = _Fio(stand, settings, say)
    read = _compare("read", bench.read, baseline, bench, say)
    write = _compare("write", bench.write, baseline, bench, say)
    return [read, write]


def _compare(
    name: fio.Direction,
    ours: Measure,
    baseline: _Fio,
    bench: _Drive,
    say: Callable[[str], None],
) -> Figure:
    rounds = bench.settings.rounds
    say(f"{name}: {rounds} rounds of {bench.settings.pages} pages")
    ours()
    bench.forget()
    if baseline.path is None:
        mine, theirs = alternate(rounds, ours)[0], None
    else:
        baseline.choose(name)
        mine, theirs = alternate(rounds, ours, lambda: baseline.measure(name))
    extra = {"cpu_seconds_per_gb": bench.cpu / (bench.moved / GB)}
    if theirs is not None:
        extra["baseline_cpu_seconds_per_gb"] = baseline.cpu_seconds_per_gb
    return Figure(
        name, Spread.of(mine), None if theirs is None else Spread.of(theirs),
        baseline.name(name), "GB/s", True, extra,
    )  # fmt: skip


class _Drive:
    """Our side: several clients in threads of their own, one batch in flight each."""

    def __init__(self, stand: Stand, settings: L2Settings) -> None:
        self.settings = settings
        self.cpu = 0.0
        self.moved = 0
        self._stand = stand
        self._clients = [stand.client(f"bench-{i}") for i in range(settings.clients + 1)]
        self._asking = threading.Semaphore(settings.clients)
        self._source = touched(settings.depth, settings.page_bytes)
        self._numbers = count()
        self._on_drive: list[NDArray[np.uint8]] = []

    def fill(self) -> None:
        """Put a round's pages and let other pages push them all down to the drive."""
        batches = self._batches(self.settings.pages)
        self._put_paced(batches)
        capacity = self._stats()["tiers"]["dram"]["capacity_bytes"] // self.settings.page_bytes
        self._put_paced(self._batches(capacity))
        tiers = np.concatenate([self._clients[0].lookup(keys).tiers for keys in batches])
        lost = int((tiers == 255).sum())
        if lost:
            raise BenchError(f"{lost} of {len(tiers)} pages were not kept; use fewer --pages")
        keys, size = np.concatenate(batches), batch_pages(self.settings)
        self._on_drive = [keys[i : i + size] for i in range(0, len(keys), size)]

    def read(self) -> float:
        """GB/s of pages that came from the drive and were verified."""
        before = self._stats()["counters"]["read_bytes_l2"]
        seconds = self._in_threads(self._on_drive, self._load)
        moved = self._stats()["counters"]["read_bytes_l2"] - before
        self.moved += moved
        wanted = sum(map(len, self._on_drive)) * self.settings.page_bytes
        if moved < 0.9 * wanted:
            raise BenchError(
                f"only {moved} of {wanted} bytes came from the drive; use more --pages"
            )
        return float(moved / GB / seconds)

    def write(self) -> float:
        """GB/s of what was written to the drive while new pages were put."""
        self._put_paced(self._batches(self.settings.depth))  # the tier is full when time starts
        before = self._stats()["counters"]["stored_bytes_l2"]
        cpu, begin = self._stand.cpu_seconds(), time.perf_counter()
        self._put_paced(self._batches(self.settings.pages))
        moved = self._stats()["counters"]["stored_bytes_l2"] - before
        seconds = time.perf_counter() - begin
        self.cpu += self._stand.cpu_seconds() - cpu
        self.moved += moved
        if not moved:
            raise BenchError("nothing was written to the drive; use more --pages")
        return float(moved / GB / seconds)

    def forget(self) -> None:
        self.cpu, self.moved = 0.0, 0

    def _batches(self, pages: int) -> list[NDArray[np.uint8]]:
        """New keys, a depth of them in each batch."""
        depth = self.settings.depth
        return [random_keys((4, next(self._numbers)), depth) for _ in range(-(-pages // depth))]

    def _stats(self) -> dict[str, Any]:
        return self._clients[0].stats()

    def _load(self, client: Client, keys: NDArray[np.uint8]) -> None:
        with self._asking:
            lease = client.load(keys, deadline_milliseconds=LOAD_MILLISECONDS)
        with lease:
            if not all(lease.verify(i, lease.page(i)) for i in range(lease.prefix)):
                raise BenchError("a page came back wrong")
            if lease.prefix != len(keys):
                raise BenchError(f"{len(keys) - lease.prefix} pages did not come back")

    def _in_threads(
        self, batches: list[NDArray[np.uint8]], one: Callable[[Client, NDArray[np.uint8]], None]
    ) -> float:
        """Every batch through one of the clients, all at work at once; seconds. The first error of
        any of them is raised."""
        errors: list[BaseException] = []
        rest = iter(batches)
        lock = threading.Lock()

        def work(client: Client) -> None:
            try:
                while not errors:
                    with lock:
                        keys = next(rest, None)
                    if keys is None:
                        return
                    one(client, keys)
            except (BenchError, AgentError, OSError, ValueError) as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(client,)) for client in self._clients]
        cpu, begin = self._stand.cpu_seconds(), time.perf_counter()
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException as error:
            errors.append(error)
            raise
        seconds = time.perf_counter() - begin
        self.cpu += self._stand.cpu_seconds() - cpu
        if errors:
            raise errors[0]
        return seconds

    def _put_paced(self, batches: list[NDArray[np.uint8]]) -> None:
        """Put pages no faster than the drive takes them, so that none is pushed out unwritten."""
        client = self._clients[0]
        ahead = AHEAD_DEPTHS * self.settings.depth * self.settings.page_bytes
        for keys in batches:
            left = keys
            end = time.monotonic() + SETTLE_SECONDS
            while len(left):
                if client.stats()["write_queue_bytes"] <= ahead:
                    status = client.put(left, self._source[: len(left)])
                    left = left[status.stored :]
                    if not len(left):
                        break
                if time.monotonic() > end:
                    raise BenchError(f"the drive took nothing for {SETTLE_SECONDS:g} s")
                time.sleep(PACE_SECONDS)


class _Fio:
    """The baseline's side."""

    def __init__(self, stand: Stand, settings: L2Settings, say: Callable[[str], None]) -> None:
        self.path = fio.find()
        self.cpu_seconds_per_gb = 0.0
        self._stand = stand
        self._say = say
        self._chosen: dict[str, tuple[tuple[str, ...], str]] = {}
        self._numbers = count()
        self._job = fio.Job(
            stand.volume_folder() / "fio.bin",
            settings.pages * settings.page_bytes,
            settings.page_bytes,
            settings.depth,
        )
        if self.path is None:
            say(f"no baseline: {fio.MISSING}")
            return
        say("laying out the file of the baseline")
        self._run("write", fio.PLAIN, "psync")

    def name(self, direction: str) -> str:
        if self.path is None:
            return fio.MISSING
        memory, engine = self._chosen[direction]
        return f"fio {engine} {' '.join(memory)}"

    def choose(self, direction: fio.Direction) -> None:
        """Try the settings and keep the fastest. Raises `BenchError` when none works."""
        tried: list[tuple[float, tuple[str, ...], str]] = []
        problem: BenchError | None = None
        for memory in fio.CANDIDATES:
            try:
                speed = self._run(direction, memory, "io_uring").gb_per_second
                tried.append((speed, memory, "io_uring"))
            except BenchError as error:
                problem = error
        if not tried:
            assert problem is not None
            raise problem
        _, memory, engine = max(tried)
        self._chosen[direction] = memory, engine

    def measure(self, direction: fio.Direction) -> float:
        answer = self._run(direction, *self._chosen[direction])
        self.cpu_seconds_per_gb = answer.cpu_seconds_per_gb
        return answer.gb_per_second

    def _run(self, direction: fio.Direction, memory: tuple[str, ...], engine: str) -> fio.Answer:
        assert self.path is not None
        name = f"fio-{next(self._numbers)}"
        words = fio.arguments(self.path, self._job, direction, memory, engine=engine)
        log = self._stand.help_out(name, words)
        end = time.monotonic() + FIO_SECONDS
        while self._stand.agent.guardian.poll(name) is None:
            if time.monotonic() > end:
                raise BenchError(f"fio did not end within {FIO_SECONDS:g} s")
            time.sleep(0.02)
        return fio.read_answer(log.read_text(errors="replace"), direction)
