"""The agent as a process: what is made in which order, and how it ends.

Start, each step only when the one before holds:

1. HTTP: from here on ``/healthz`` answers and ``/readyz`` says which step is under way.
2. Folders: made, checked, locked. A second agent on the same ones ends here.
3. The device, the caches (one `Core` per trust domain) and the cache thread with its sockets.
4. The policy. Alone: the file has to be valid and applicable, for a wrong one is a mistake of
   whoever starts the agent. Under Kubernetes: the last good revision from disk, if there is one,
   before the API server has said a word.
5. The loops that follow the policy from then on.

Every loop runs under one `Supervisor`. A mistake of the user's is a `StartError`, one line. End, on
SIGTERM or SIGINT: nothing more is admitted, the API server is told, counters are saved, clients are
let go, volumes are closed; then the process ends with 0. If that takes longer than the setting
allows, it ends anyway, with 1.

Time: logic counts on the monotonic clock alone. The wall clock is read for the times that people
see, and a jump of it moves nothing else.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog

from kvtier_agent import logs, native
from kvtier_agent.cache.settings import CacheSettings
from kvtier_agent.cache.table_view import table_bytes
from kvtier_agent.node import facts
from kvtier_agent.node.board import StatusBoard
from kvtier_agent.node.control import Control
from kvtier_agent.node.desired import Problem, Wanted
from kvtier_agent.node.engine_pool import EnginePool
from kvtier_agent.node.errors import ConfigurationError, StartError
from kvtier_agent.node.facts import Device, Facts
from kvtier_agent.node.memory import Memory
from kvtier_agent.node.other_domains import sweep_memory, sweep_volumes
from kvtier_agent.node.places import PlaceError, Places, held_bytes
from kvtier_agent.node.rooms import Rooms
from kvtier_agent.node.signals import Signals
from kvtier_agent.node.standalone import PolicyFile, PolicyFileError
from kvtier_agent.node.version import agent_version
from kvtier_agent.node.volumes import measure_volumes
from kvtier_agent.server.http import HttpServer
from kvtier_agent.server.loop import CacheLoop
from kvtier_agent.server.settings import ServerError, ServerSettings, TrustDomain
from kvtier_agent.settings import AgentSettings
from kvtier_agent.storage.core import Core, CoreError, CoreSettings
from kvtier_agent.storage.journal_files import JournalSettings
from kvtier_agent.storage.scrub import Scrub
from kvtier_agent.supervise import Supervisor

if TYPE_CHECKING:
    from kvtier_agent.node.cluster import Cluster

__all__ = ["Agent", "StartError", "run"]

LEAST_IN_FLIGHT: Final = 1 << 20
"""Less keeps no drive at work."""

log = structlog.get_logger(__name__)


def run(settings: AgentSettings) -> int:
    """The whole life of the process; the exit status. Raises `StartError`."""
    logs.configure(settings.log_level, settings.log_format)
    agent = Agent(settings)
    signals = Signals((signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    try:
        agent.start()
        while signals.wait() == signal.SIGHUP:
            agent.reread()
    finally:
        late = threading.Timer(settings.stop_seconds, _end_anyway)
        late.daemon = True
        late.start()
        agent.stop()
        late.cancel()
    return 0


def _end_anyway() -> None:
    log.error("an orderly stop took too long; ending anyway")
    os._exit(1)


class Agent:
    """One agent process. `start` and `stop` on the same thread; both may be called once."""

    def __init__(self, settings: AgentSettings) -> None:
        self.settings = settings
        self.supervisor = Supervisor()
        self.http: HttpServer | None = None
        self.loop: CacheLoop | None = None
        self.control: Control | None = None
        self.cluster: Cluster | None = None
        self.board: StatusBoard | None = None
        self._places: Places | None = None
        self._cores: dict[str, Core] = {}
        self._file: PolicyFile | None = None
        self._device = Device("cpu", (0,))
        self._arenas_most: int | None = None
        self._memory: Memory | None = None
        self._engine_pool = EnginePool(0, time.monotonic())

    def start(self) -> None:
        """See the module. Raises `StartError`; `stop` clears up after that too."""
        try:
            self._start()
        except (ServerError, PlaceError, PolicyFileError, ConfigurationError, CoreError) as e:
            raise StartError(str(e)) from e

    def reread(self) -> None:
        """SIGHUP: look at the policy file now."""
        if self._file is not None:
            self._file.reread()

    def _start(self) -> None:
        settings = self.settings
        first: Wanted | None = None
        if settings.policy is not None:
            self._file = PolicyFile(settings.policy, self._heard_file, settings.poll_seconds)
            first = self._file.read_first()
        self._start_http()
        self._step("folders")
        self._places = Places.open(settings.state_dir, settings.shm_dir, settings.run_dir)
        memory = self._memory = Memory(self._places.state, settings.node_name or "")
        loop = self.loop = CacheLoop(self._server_settings(), version=agent_version())
        loop.lock()
        self._sweep(self._places)
        self._step("device and caches")
        self._device = self._find_device()
        self._open_caches(loop, self._places)
        control = self.control = Control(
            Rooms(loop, self._cores),
            self._measure,
            keep=memory.keep,
            look_seconds=settings.look_seconds,
        )
        board = self.board = StatusBoard(
            control,
            loop,
            self.supervisor,
            memory,
            settings.run_dir / "status.json",
            save_seconds=settings.save_seconds,
        )
        control.changed = self._view_changed
        self._step("policy")
        wanted, grace_left = memory.recall()
        self._engine_pool = EnginePool(memory.engine_pool, time.monotonic())
        if first is not None:
            self._start_alone(control, first)
        else:
            from kvtier_agent.node.cluster import Cluster  # a second that the other case spares

            assert settings.node_name is not None
            self.cluster = Cluster(settings.node_name, settings.kubeconfig, control, board.status)
            board.rival = self.cluster.rival
            self.cluster.check()
            control.resume(wanted, grace_left)
        self.supervisor.start("control", control.run)
        self.supervisor.start("state", board.run)
        if self._file is not None:
            self.supervisor.start("policy-file", self._file.run)
        if self.cluster is not None:
            self.supervisor.start("kubernetes", self.cluster.run)
        assert self.http is not None
        self.http.attach(lambda: loop.snapshot, settings.run_dir)
        log.info(
            "agent started",
            version=agent_version(),
            http=f"{self.http.address[0]}:{self.http.address[1]}",
            run_dir=str(settings.run_dir),
            domains=[str(d) for d in settings.domain],
            device=self._device.kind,
            l0=settings.l0,
            native_extension=native.described(),
        )

    def _sweep(self, places: Places) -> None:
        """What other domains left: from memory now, for there may be no room for ours beside it;
        from the volumes on the side, for a drive that hangs must not hold up the start."""
        settings = self.settings
        served = [domain.name for domain in settings.domain]
        sweep_memory(places.arenas, settings.run_dir, served)
        mounts = {volume.name: volume.path for volume in settings.volume}
        threading.Thread(
            target=sweep_volumes, args=(mounts, served), name="sweep-domains", daemon=True
        ).start()

    def _start_http(self) -> None:
        address = self.settings.http
        self.http = HttpServer(address.host, address.port, self.supervisor)
        self.supervisor.start("http", self.http.run)

    def _start_alone(self, control: Control, first: Wanted) -> None:
        control.say(first, None)
        control.turn(time.monotonic())
        refusal = control.view.refusal
        if refusal is not None:
            raise StartError(f"policy {self.settings.policy}: {refusal.message}")

    def _open_caches(self, loop: CacheLoop, places: Places) -> None:
        settings = self.settings
        limit = facts.memory_limit(settings.memory_headroom)
        ceiling = facts.size_of(places.arenas)
        if limit is not None:
            ceiling = min(ceiling, limit.size)
        self._arenas_most = ceiling
        scrubs: dict[str, Scrub] = {}
        for domain in settings.domain:
            core = Core(
                CoreSettings(
                    domain=domain.name,
                    arena_folder=places.arenas,
                    table_path=places.arenas / f"{domain.name}.table",
                    volumes={v.name: v.path for v in settings.volume},
                    maximum_l0_bytes=(
                        self._device.first if self._device.kind == "cuda" else ceiling
                    ),
                    maximum_l1_bytes=ceiling,
                    device=self._device.kind,
                    gid=domain.gid,
                    allow_root_filesystem=settings.allow_root_filesystem,
                    keep_memory=settings.memory_on_stop == "keep",
                    cache=self._cache_settings(),
                    journal=JournalSettings(log_percent=settings.journal_log_percent),
                    nvme_in_flight_bytes=self._share(settings.nvme_in_flight, LEAST_IN_FLIGHT),
                ),
                wake=loop.wake,
                start=self.supervisor.start,
            )
            self._cores[domain.name] = core
            loop.add(TrustDomain(domain.name, core, domain.gid))
            found = core.memory.restart
            if found.say():
                log.info(
                    "memory of the agent before", domain=domain.name, what=found.say(),
                    taken_over=found.taken_over, dropped=dict(found.dropped), cold=found.cold,
                )  # fmt: skip
            if found.taken_over:
                scrubs[domain.name] = Scrub(core, loop.post, percent=settings.scrub_percent)
        loop.open()
        for name, scrub in scrubs.items():
            self.supervisor.start(f"scrub-{name}", scrub.run)
        self.supervisor.start("cache", loop.run, wake=loop.wake)

    def _find_device(self) -> Device:
        try:
            return facts.find_device(self.settings.device, self.settings.device_memory)
        except LookupError as e:
            raise StartError(
                f"--device cuda: {e}; give the agent access to the device (runtimeClassName and "
                "NVIDIA_VISIBLE_DEVICES), or run it with --device cpu"
            ) from e

    def _cache_settings(self) -> CacheSettings:
        settings = self.settings
        return CacheSettings(
            lease_seconds=settings.lease_seconds,
            pin_seconds=settings.pin_seconds,
            pin_percent=settings.pin_percent,
            max_pins_per_client=settings.max_pins,
            recompute_tokens_per_second=settings.recompute_tokens_per_second,
            write_queue_bytes=settings.write_queue,
            compaction_bytes_per_second=self._share(
                settings.compaction_rate, min(1, settings.compaction_rate)
            ),
            compaction_hot_percent=settings.compaction_hot_percent,
            max_pages=settings.max_pages,
        )

    def _share(self, whole: int, least: int) -> int:
        """One trust domain's part of what a drive may be given; in any case ``least``."""
        return max(least, whole // len(self.settings.domain))

    def _server_settings(self) -> ServerSettings:
        return ServerSettings(
            run_dir=self.settings.run_dir,
            lease_seconds=self.settings.lease_seconds,
            max_clients=self.settings.max_clients,
            max_keys=self.settings.max_keys,
        )

    def _measure(self) -> Facts:
        """Fresh facts; on the control thread."""
        assert self._places is not None
        settings = self.settings
        volumes, broken = measure_volumes(
            {volume.name: volume.path for volume in settings.volume},
            [domain.name for domain in settings.domain],
            self._cores.values(),
        )
        snapshot = self.loop.snapshot if self.loop is not None else None
        pools = [d.engine_pool_bytes for d in snapshot.domains.values()] if snapshot else []
        assert self._memory is not None
        pool = self._memory.engine_pool = self._engine_pool.bytes_at(sum(pools), time.monotonic())
        geometries = [d.geometry for d in snapshot.domains.values()] if snapshot else []
        return Facts(
            shape=settings.l0,
            engine_pool=pool,
            tables=tuple(
                facts.TableFacts(
                    settings.max_pages, len(settings.domain), g.slot_bytes, g.nvme_slot_bytes
                )
                for g in geometries
                if g is not None
            ),
            page_tokens=tuple(sorted({g.page_tokens for g in geometries if g is not None})),
            device=self._device,
            memory=facts.memory_limit(settings.memory_headroom),
            arenas_most=self._arenas_most,
            arenas_held=held_bytes(self._places.arenas, (".l0", ".l1")),
            shm_available=self._room_for_arenas(self._places.arenas),
            volumes=volumes,
            broken=broken,
        )

    def _room_for_arenas(self, folder: Path) -> int:
        held = held_bytes(folder, (".l0", ".l1"))
        tables = held_bytes(folder, (".table",))
        most = len(self.settings.domain) * table_bytes(self.settings.max_pages)
        return facts.beside_tables(facts.available_in(folder, held), tables, most)

    def _heard_file(self, wanted: Wanted | None, problem: Problem | None) -> None:
        if problem is not None:
            log.error("policy file is wrong; the last good one stays", problem=problem.message)
        assert self.control is not None
        self.control.say(wanted, problem)

    def _view_changed(self) -> None:
        if self.board is not None:
            self.board.wake()
        if self.cluster is not None:
            self.cluster.wake()

    def _step(self, name: str) -> None:
        if self.http is not None:
            self.http.cause = name

    def stop(self) -> None:
        """An orderly end, from whatever state the start has reached."""
        log.info("agent stops")
        if self.control is not None:
            self._quietly(self.supervisor.stop, 5.0, ["control", "policy-file"])
            self._quietly(self.control.stop_admitting)
        self._quietly(self.supervisor.stop, 3.0, ["kubernetes"])
        self._quietly(self.supervisor.stop, 3.0, ["state"])
        if self.board is not None:
            self._quietly(self.board.save, True)
        self._quietly(self.supervisor.stop, 3.0)
        for name, core in self._cores.items():
            self._quietly(self._close, name, core)
        if self.loop is not None:
            self._quietly(self.loop.close)
        if self.http is not None:
            self._quietly(self.http.close)
        if self._places is not None:
            self._quietly(self._places.close)

    def _close(self, name: str, core: Core) -> None:
        if core.close() and self._places is not None:
            held = held_bytes(self._places.arenas, (f"{name}.l0", f"{name}.l1", f"{name}.table"))
            log.info(
                "pages stay in memory for the next agent", domain=name, bytes=held,
                folder=str(self._places.arenas), otherwise="--memory-on-stop free",
            )  # fmt: skip

    @staticmethod
    def _quietly(step: Any, *arguments: Any) -> None:
        """One step of the end; its failure must not keep the others from being taken."""
        try:
            step(*arguments)
        except Exception:
            log.exception("a step of the stop failed", step=getattr(step, "__qualname__", ""))
