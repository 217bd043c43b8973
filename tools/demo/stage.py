"""The stage: a real API server, the real operator, three real agents, each a process of its own.

What is not real is the hardware: the three nodes are Node objects that somebody created, and
their agents share this machine, with folders and small tiers of their own. All processes and the
folder with everything in it end with the demo, also when it is killed.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from command_run import KVTIER
from controlplane import ControlPlane
from controlplane.api import ApiClient
from kvtier_agent.replay.guardian import Guardian
from kvtier_agent.server.connection import is_live

NODES = ("node-a", "node-b", "node-c")
POLICY = "demo"

_REPOSITORY = Path(__file__).resolve().parents[2]
_NODES_PATH = "/apis/kvtier.io/v1alpha1/kvtiernodes"
_POLICIES_PATH = "/apis/kvtier.io/v1alpha1/kvtierpolicies"
_PATIENCE_SECONDS = 60.0


class DemoError(Exception):
    """The demo cannot go on; one line."""


class Stage:
    """Use as a context manager; `start` brings everything up.

    Args:
        say: takes progress lines.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
        name = f"kvtier-demo-{os.getpid()}"
        # Sockets want short paths and arenas shared memory; volumes want a drive.
        self.folders = (base / name, Path(tempfile.gettempdir()) / name)
        if self.folders[0] == self.folders[1]:
            self.folders = (base / name, base / f"{name}-volumes")
        self._stack = ExitStack()
        self.pids: dict[str, int] = {}

    def __enter__(self) -> Stage:
        self._guardian = self._stack.enter_context(Guardian(self.folders))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    # -- up --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Everything but the policy."""
        root = self.folders[0]
        began = time.monotonic()
        self.plane = self._stack.enter_context(ControlPlane(root / "plane", log=self._say))
        self.api: ApiClient = self.plane.api()
        self._stack.callback(self.api.close)
        self._say(f"API server at {self.plane.url}, {time.monotonic() - began:.1f} s after start")
        self.plane.kubectl("apply", "--server-side", "-f", str(_REPOSITORY / "crds"))
        for crd in ("kvtierpolicies.kvtier.io", "kvtiernodes.kvtier.io"):
            self.plane.kubectl("wait", "--for=condition=Established", f"crd/{crd}", "--timeout=30s")
        nodes = [
            {"apiVersion": "v1", "kind": "Node", "metadata": {"name": n, "labels": {"demo": "yes"}}}
            for n in NODES
        ]
        namespace = {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": "kvtier-system"},
        }
        self.plane.kubectl("apply", "-f", "-", input=_list([namespace, *nodes]))
        self._say("CRDs applied, nodes " + ", ".join(NODES) + " created")
        access = ["--kubeconfig", str(self.plane.kubeconfig), "--http", "127.0.0.1:0"]
        self._run("operator", ["operator", *access], {})
        for node in NODES:
            self._start_agent(node)
        self._say("operator and three agents started")
        self._wait(lambda: all(map(self._listens, NODES)), "the agents to listen")

    def socket(self, node: str) -> Path:
        return self.folders[0] / node / "run" / "default.sock"

    def _start_agent(self, node: str) -> None:
        home = self.folders[0] / node
        volume = self.folders[1] / node
        for folder in (home / "run", home / "arenas", home / "state", volume):
            folder.mkdir(parents=True)
        arguments = [
            "agent",
            *("--node-name", node),
            *("--kubeconfig", str(self.plane.kubeconfig)),
            *("--run-dir", str(home / "run")),
            *("--shm-dir", str(home / "arenas")),
            *("--state-dir", str(home / "state")),
            *("--volume", f"data0={volume}"),
            *("--http", "127.0.0.1:0"),
            *("--device", "cpu"),
            "--allow-root-filesystem",
        ]
        self._run(node, arguments, {"OMP_NUM_THREADS": "1"})

    def _run(self, name: str, arguments: list[str], environment: dict[str, str]) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("KVTIER_")}
        kept.pop("NODE_NAME", None)
        self.pids[name] = self._guardian.start(
            name, [*KVTIER, *arguments], log=self.log(name), env=kept | environment
        )

    def log(self, name: str) -> Path:
        return self.folders[0] / f"{name}.log"

    def _listens(self, node: str) -> bool:
        return self.socket(node).exists() and is_live(self.socket(node))

    # -- what is there ---------------------------------------------------------------------------

    def apply(self, manifest: Path) -> None:
        """`kubectl apply -f` a policy."""
        self.plane.kubectl("apply", "-f", str(manifest))

    def nodes(self, api: ApiClient | None = None) -> dict[str, dict[str, Any]]:
        """The KVTierNode objects by name; another thread than the first brings its own client."""
        items = (api or self.api).get(_NODES_PATH).get("items", [])
        return {item["metadata"]["name"]: item for item in items}

    def policy(self) -> dict[str, Any]:
        """The policy as the API server has it; {} before it is applied."""
        return self.api.find(f"{_POLICIES_PATH}/{POLICY}") or {}

    def desired_revision(self) -> str:
        return str(self.policy().get("status", {}).get("desiredRevision", ""))

    def in_force(self, other_than: str = "") -> str:
        """The revision in force on all nodes, "" while they differ or it is `other_than`."""
        nodes = self.nodes()
        revisions = {nodes.get(n, {}).get("status", {}).get("revision", "") for n in NODES}
        (one,) = revisions if len(revisions) == 1 else ("",)
        return "" if one == other_than else str(one)

    def wait_in_force(self, other_than: str = "", seconds: float = _PATIENCE_SECONDS) -> str:
        """Wait until one revision, another than the one given, is in force on all nodes."""
        self._wait(
            lambda: bool(self.in_force(other_than)),
            "the policy to be in force on all nodes",
            seconds=seconds,
            nap=0.03,
        )
        return self.in_force(other_than)

    def check(self) -> None:
        """Raise DemoError when something ended that should not have."""
        self.plane.check()
        for name in self.pids:
            status = self._guardian.poll(name)
            if status is not None:
                raise DemoError(f"{name} ended with status {status}: {self._last_words(name)}")

    def left_behind(self) -> list[str]:
        """What is still there although it should be gone; for after the end."""
        left = [str(folder) for folder in self.folders if folder.exists()]
        left += [f"{name} (process {pid})" for name, pid in self.pids.items() if _runs(pid)]
        return left

    def _wait(
        self,
        condition: Callable[[], bool],
        what: str,
        *,
        seconds: float = _PATIENCE_SECONDS,
        nap: float = 0.1,
    ) -> None:
        end = time.monotonic() + seconds
        while not condition():
            self.check()
            if time.monotonic() > end:
                words = "; ".join(f"{name}: {self._last_words(name)}" for name in self.pids)
                raise DemoError(f"waited {seconds:.0f} s in vain for {what} ({words})")
            time.sleep(nap)

    def _last_words(self, name: str) -> str:
        try:
            lines = self.log(name).read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1][:300] if lines else "it said nothing"


def _list(items: list[dict[str, Any]]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return False
    return state != "Z"
