"""Every loop of an agent, killed and held by name: health says so, it comes back, it is counted.

The loops are those that the supervisor of a whole agent knows, in each of the ways an agent runs,
so a new loop is killed here without a line more. One that none of these agents starts, or a thread
that no supervisor looks after, fails a test of its own. Health's own times pass when the test says
so: only what a loop needs for itself takes real time.
"""

from __future__ import annotations

import ast
import re
import shutil
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import kvtier_agent
import numpy as np
import pytest
import yaml
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.identity import chain_keys
from kvtier_agent.node import control
from kvtier_agent.node.main import Agent
from kvtier_agent.node.places import arena_folder
from kvtier_agent.server.client import Client
from kvtier_agent.settings import AgentSettings
from kvtier_agent.storage import checkpoint, mover
from kvtier_agent.storage.mover import Mover
from kvtier_agent.supervise import STUCK_SECONDS, Supervisor
from kvtier_cli.options import read_settings

GEOMETRY = Geometry.of_page_bytes(64 * 1024, 256)
PAGES = 8
RED_WITHIN_SECONDS = 5.0
PATIENCE_SECONDS = 30.0
"""Of what is only waited for: the machine may be busy."""
RECOVER_SECONDS = 1000.0
POLICY = """
apiVersion: kvtier.io/v1alpha1
kind: KVTierPolicy
metadata: {name: loops}
spec:
  tiers: {hbm: {size: 4Mi}, dram: {size: 16Mi}, nvme: {size: 64Mi, volumes: [data0]}}
  valueDensity: {model: classic}
"""

ON_THEIR_OWN = re.compile(
    r"kvtier-client"  # of a client library: the test's, and the readiness probe's
    r"|sweep-domains"  # once, at start
    r"|file-system"  # makes calls for loops, which wait for it only so long
    r"|asyncio_\d+|Thread-\d+ \(process_request_thread\)"  # a name looked up; a request answered
)
"""Threads in the agent's process that are no loops."""


class Clock:
    """The monotonic clock, and what the test lets pass on top."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


class Here:
    """An agent in this process, so that its loops can be reached."""

    def __init__(self, root: Path, run_dir: Path, **options: Any) -> None:
        (root / "data0").mkdir(exist_ok=True)
        self.socket = run_dir / "default.sock"
        self.clock = Clock()
        before = set(threading.enumerate())
        self.agent = Agent(
            read_settings(
                AgentSettings,
                {
                    "run_dir": run_dir, "state_dir": root / "state", "http": "127.0.0.1:0",
                    "volume": [f"data0={root / 'data0'}"], "allow_root_filesystem": True,
                    "device": "cpu", "l0": "engine", **options,
                },
            )
        )  # fmt: skip
        self.supervisor = Supervisor(self.clock, recover_seconds=RECOVER_SECONDS)
        self.agent.supervisor = self.supervisor
        try:
            self.agent.start()
        except BaseException:
            self.agent.stop()
            raise
        self.strangers = [
            thread.name
            for thread in set(threading.enumerate()) - before
            if thread.name not in self.supervisor.names() and not ON_THEIR_OWN.match(thread.name)
        ]
        assert self.agent.http is not None
        self.url = f"http://127.0.0.1:{self.agent.http.address[1]}"

    def get(self, path: str, seconds: float = PATIENCE_SECONDS) -> tuple[int, str]:
        """Status and body; (0, "") when nobody answers."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=seconds) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def health(self, name: str) -> str:
        """What `/healthz` says of a loop; "" while it is well or nobody answers."""
        code, body = self.get("/healthz")
        lines = [x for x in body.splitlines() if x.startswith(f"{name}: ")]
        assert not lines or code == 503
        return lines[0] if lines else ""

    def restarts(self, name: str) -> int:
        """As the metrics show them."""
        found = re.search(
            rf'^kv_loop_restarts_total{{loop="{name}"}} (\S+)$', self.get("/metrics")[1], re.M
        )
        return int(float(found[1])) if found else -1

    def heal(self) -> None:
        """Let the time pass after which a loop that came back counts as well."""
        self.clock.ahead += RECOVER_SECONDS + 1
        until(lambda: self.get("/healthz") == (200, "ok\n"), "health is green again")


def until(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError(f"not within {PATIENCE_SECONDS:g} s: {what}")


@contextmanager
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A folder for what stays, and one with a short name for sockets."""
    run_dir = Path(tempfile.mkdtemp(prefix="kvt-"))
    try:
        yield tmp_path_factory.mktemp("agent"), run_dir
    finally:
        shutil.rmtree(arena_folder(Path("/dev/shm"), run_dir), ignore_errors=True)
        shutil.rmtree(run_dir, ignore_errors=True)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    """With a policy file, and after a restart that left pages in DRAM to be scrubbed."""
    with folders(tmp_path_factory) as (root, run_dir):
        policy = root / "policy.yaml"
        policy.write_text(POLICY)
        first = Here(root, run_dir, policy=policy)
        try:
            with Client(first.socket, GEOMETRY, timeout_seconds=PATIENCE_SECONDS) as client:
                assert client.wait_connected(PATIENCE_SECONDS)
                keys = chain_keys(client.root, np.arange(PAGES * 256, dtype=np.uint32), 256)
                pages = np.random.default_rng(1).integers(
                    0, 256, (PAGES, client.page_bytes), dtype=np.uint8
                )
                assert client.put(keys, pages).stored == PAGES
        finally:
            first.agent.stop()
        here = Here(root, run_dir, policy=policy)
        yield here
        here.agent.stop()
        assert here.supervisor.names() == []


@pytest.fixture(scope="module")
def in_a_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    """Under Kubernetes, whose API server does not answer."""
    with folders(tmp_path_factory) as (root, run_dir):
        kubeconfig = root / "kubeconfig"
        kubeconfig.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1", "kind": "Config", "current-context": "c",
                    "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
                    "users": [{"name": "u", "user": {"token": "t"}}],
                    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                }
            )
        )  # fmt: skip
        here = Here(root, run_dir, node_name="node-a", kubeconfig=kubeconfig)
        yield here
        here.agent.stop()
        assert here.supervisor.names() == []
        assert not arena_folder(Path("/dev/shm"), run_dir).exists(), "memory without a page is free"


@pytest.fixture(params=["alone", "in_a_cluster"])
def here(request: pytest.FixtureRequest) -> Here:
    found: Here = request.getfixturevalue(request.param)
    return found


def kill(here: Here, name: str) -> float:
    """Kill one loop and see it through to health; seconds until health was red."""
    before = here.restarts(name)
    begin = time.monotonic()
    here.supervisor.kill(name, hold=True)
    if name == "http":
        until(lambda: here.get("/healthz", 0.5) == (0, ""), "the probe gets no answer")
        seconds = time.monotonic() - begin
        assert any(x.startswith("http: died: LoopKilledError") for x in here.supervisor.causes())
    else:
        line = until(lambda: here.health(name), f"health is red for {name}")
        seconds = time.monotonic() - begin
        assert line == f"{name}: died: LoopKilledError: killed on request"
        assert here.get("/readyz")[0] == 503
    here.supervisor.revive(name)
    until(lambda: "restarted" in here.health(name), f"{name} is started again")
    assert here.health(name).endswith("died before: LoopKilledError: killed on request")
    assert here.restarts(name) > before
    here.heal()
    return seconds


def test_a_killed_loop_turns_health_red_by_name_comes_back_and_is_counted(here: Here) -> None:
    for name in here.supervisor.names():
        seconds = kill(here, name)
        if seconds > RED_WITHIN_SECONDS:  # once more: somebody else may have had the processor
            seconds = kill(here, name)
        assert seconds <= RED_WITHIN_SECONDS, name


def test_a_loop_that_stands_still_is_stuck_by_name_until_it_goes_on(here: Here) -> None:
    for name in here.supervisor.names():
        stands = here.supervisor.hang(name)
        assert stands.wait(PATIENCE_SECONDS), f"{name} never beats"
        here.clock.ahead += STUCK_SECONDS + 0.1
        if name == "http":
            assert here.get("/healthz", 0.5) == (0, "")
            assert any(x.startswith("http: stuck") for x in here.supervisor.causes())
        else:
            line = until(lambda name=name: here.health(name), f"health is red for {name}")
            assert line.startswith(f"{name}: stuck: no sign of life for ")
        here.supervisor.revive(name)
        until(lambda: here.get("/healthz") == (200, "ok\n"), "health is green again")


@contextmanager
def in_a_turn(here: Here, gate: threading.Event) -> Iterator[tuple[str, threading.Event]]:
    """The control's turn does not end before the gate opens."""
    its, inside = here.agent.control, threading.Event()
    assert its is not None

    def turn(now: float) -> None:
        inside.set()
        gate.wait()

    with mock.patch.object(its, "turn", turn):
        yield "control", inside


@contextmanager
def in_a_batch(here: Here, gate: threading.Event) -> Iterator[tuple[str, threading.Event]]:
    """Neither does what a mover's thread is at."""
    (core,) = here.agent._cores.values()
    assert isinstance(core._mover, Mover)
    inside, who = threading.Event(), []

    def batch() -> None:
        who.append(threading.current_thread().name)
        inside.set()
        gate.wait()

    core._mover.later(batch, waits=True)
    assert inside.wait(PATIENCE_SECONDS)
    yield who[0], inside


@contextmanager
def in_a_checkpoint(here: Here, gate: threading.Event) -> Iterator[tuple[str, threading.Event]]:
    """Nor a checkpoint that is due."""
    (core,) = here.agent._cores.values()
    inside = threading.Event()
    due = SimpleNamespace(due=True, failed=False, folder=Path("due"), gone=False)

    def write(*_: Any, **__: Any) -> None:
        due.due = False
        inside.set()
        gate.wait()

    with (
        mock.patch.object(checkpoint, "write_checkpoint", write),
        mock.patch.object(core.nvme._checkpoints, "_journals", return_value=[due]),
    ):
        yield "journal-default", inside


HANGS = {
    "a turn": (in_a_turn, control.STUCK_SECONDS),
    "a batch": (in_a_batch, mover.STUCK_SECONDS),
    "a checkpoint": (in_a_checkpoint, mover.STUCK_SECONDS),
}
"""Inside what a loop may hang, and after how long without a sign of life health is red."""


@pytest.mark.parametrize("what", HANGS)
def test_a_loop_that_hangs_inside_its_work_is_stuck_after_what_it_is_allowed(
    alone: Here, what: str
) -> None:
    hang, bound = HANGS[what]
    assert bound <= 30.0
    gate = threading.Event()
    try:
        with hang(alone, gate) as (name, inside):
            assert inside.wait(PATIENCE_SECONDS), "the work never began"
            alone.clock.ahead += bound / 2  # others beat again in a moment
            until(lambda: alone.get("/healthz") == (200, "ok\n"), "it may take so long")
            alone.clock.ahead += bound / 2 + 0.1
            line = until(lambda: alone.health(name), f"health is red for {name}")
            assert line.startswith(f"{name}: stuck: no sign of life for ")
            gate.set()
            until(lambda: alone.get("/healthz") == (200, "ok\n"), "health is green again")
    finally:
        gate.set()


def test_a_killed_loop_comes_back_by_itself(here: Here) -> None:
    """All at once, as a cause that they share would do it."""
    names = here.supervisor.names()
    before = {name: here.restarts(name) for name in names}
    for name in names:
        here.supervisor.kill(name)
    until(
        lambda: all(here.restarts(name) > before[name] for name in names), "every restart counted"
    )
    here.heal()


def test_no_thread_of_an_agent_is_without_a_supervisor(here: Here) -> None:
    assert here.strangers == []


def started_in_the_code() -> dict[str, re.Pattern[str]]:
    """Place -> what the names look like of loops that are started there."""
    found = {}
    package = Path(kvtier_agent.__file__).parent
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package)
        if place.parts[0] in ("replay", "bench"):  # they start processes
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and len(node.args) >= 2):
                continue
            called = node.func
            if (getattr(called, "attr", None) or getattr(called, "id", "")) != "start":
                continue
            found[f"{place}:{node.lineno}"] = re.compile(pattern(node.args[0]) + r"\Z")
    return found


def pattern(name: ast.expr) -> str:
    if isinstance(name, ast.JoinedStr):
        return "".join(pattern(part) for part in name.values)
    return re.escape(str(name.value)) if isinstance(name, ast.Constant) else ".+"


def test_every_loop_that_the_code_starts_is_killed_here(alone: Here, in_a_cluster: Here) -> None:
    names = {*alone.supervisor.names(), *in_a_cluster.supervisor.names()}
    places = started_in_the_code()
    assert any(p.match("kubernetes") for p in places.values()), "the search finds nothing"
    assert len(places) >= 8
    missed = [place for place, shape in places.items() if not any(map(shape.match, names))]
    assert missed == []
