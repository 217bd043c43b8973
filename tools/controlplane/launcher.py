"""Start a control plane and end it.

:class:`ControlPlane` keeps everything it makes in one folder:

    root/
      pki/                 the authority, certificates, the key that signs tokens
      etcd/                the data; etcd.sock is its only address, so that no port can be taken
      kubeconfigs/         one file per user
      audit.jsonl          with ``audit=True``: one line per write
      <program>.log        what each program said

and runs each program under :mod:`controlplane.supervisor`, with ``root`` as its working folder.
Only the API server (on a free loopback port) can be reached through the network, and only with a
certificate or token that it accepts; RBAC is on. Stopping the API server and starting it again
keeps its port and its data, so that an outage can be played to clients that are connected.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from controlplane import flags
from controlplane.api import ApiClient, ApiError
from controlplane.build import Log, to_stderr, tool_path
from controlplane.credentials import Credentials, certificate_user, file_name, write_kubeconfig
from controlplane.processes import Process, free_port

OPTIONAL = ("kube-controller-manager", "kube-scheduler", "kwok")
"""What ``with_`` may name."""

_POLL_SECONDS = 0.05


class ControlPlaneError(Exception):
    """A program did not start, or ended; the message holds the end of its log."""


class ControlPlane:
    """A running control plane, from ``with ControlPlane(root) as plane`` until the block ends.

    Args:
        root: A folder for everything; made if missing. One that an earlier control plane left is
            taken up again, with its data and its certificates.
        with_: Which of :data:`OPTIONAL` to run too. They start once the API server is ready.
        audit: Record every write (verbs create, update, patch, delete, deletecollection; metadata
            only, no reads) in :attr:`audit_log`.
        apiserver_flags: Added to the API server's, for the odd test.
        start_timeout: Seconds that each program has to become ready.
        log: Receives progress lines, such as those of a build.

    Its programs end with this process, also when it is killed. Raises ToolError where a program
    can be neither found nor built, and :class:`ControlPlaneError` where one does not start.
    """

    def __init__(
        self,
        root: Path,
        with_: Iterable[str] = (),
        audit: bool = False,
        *,
        apiserver_flags: Sequence[str] = (),
        start_timeout: float = 60.0,
        log: Log = to_stderr,
    ) -> None:
        self.root = root.absolute()
        self._with = tuple(with_)
        unknown = sorted(set(self._with) - set(OPTIONAL))
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: not one of {', '.join(OPTIONAL)}")
        self._audit = audit
        self._apiserver_flags = tuple(apiserver_flags)
        self._start_timeout = start_timeout
        self._log = log
        self._port = 0
        self._processes: dict[str, Process] = {}

    # -- life ------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start everything; returns when the API server is ready and its namespaces exist."""
        names = ("pki", "etcd", "kube-apiserver", *self._with)
        self._tools = {name: tool_path(name, log=self._log) for name in names}
        if "kwok" in self._with:
            self._tools["kwok-stages"] = tool_path("kwok-stages", log=self._log)
        self.root.mkdir(parents=True, exist_ok=True)
        self._lock = (self.root / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ControlPlaneError(
                f"another control plane runs in {self.root}; give this one a folder of its own"
            ) from None
        try:
            self._credentials = Credentials(self.root / "pki", self._tools["pki"])
            (self.root / "kubeconfigs").mkdir(mode=0o700, exist_ok=True)
            self._start_etcd()
            self._start_on_some_port()
            for name in self._with:
                self._start_optional(name)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End everything, at once: what the folder holds is not needed in good order."""
        processes = [*reversed(self._processes.values())]
        for process in processes:
            process.ask_to_stop(kill=True)
        for process in processes:
            process.wait()
        self._processes.clear()
        self._lock.close()

    def check(self) -> None:
        """Raise :class:`ControlPlaneError` if a program has ended that was not asked to."""
        for process in self._processes.values():
            if not process.running:
                raise _ended(process)

    # -- outages ---------------------------------------------------------------------------------

    def stop_apiserver(self, *, kill: bool = False) -> None:
        """End the API server and wait until it is gone; ``kill`` gives it no time to say so."""
        process = self._processes.pop("kube-apiserver", None)
        if process is not None:
            process.ask_to_stop(kill=kill)
            process.wait()

    def start_apiserver(self) -> None:
        """Start the API server again, on the port it had, and wait until it is ready."""
        if "kube-apiserver" in self._processes:
            return
        process = self._run("kube-apiserver", self._apiserver_arguments())
        self._until_ready(process)

    # -- talking to it ---------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Where the API server listens: ``https://127.0.0.1:<port>``."""
        return f"https://127.0.0.1:{self._port}"

    @property
    def ca_file(self) -> Path:
        """The certificate of the authority that signed the API server's."""
        return self._credentials / "ca.crt"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's, whom RBAC does not restrict (group ``system:masters``)."""
        return self.user_kubeconfig("kubernetes-admin", ["system:masters"])

    def user_kubeconfig(self, user: str, groups: Iterable[str] = ()) -> Path:
        """A kubeconfig that makes its bearer ``user`` in ``groups``; RBAC decides on the rest."""
        wanted = tuple(groups)
        certificate, key = self._credentials.client(user, wanted)
        return self._kubeconfig(file_name(user, *wanted), certificate_user(certificate, key))

    def token_kubeconfig(self, token: str) -> Path:
        """A kubeconfig around a bearer token, such as ``kubectl create token`` prints."""
        return self._kubeconfig(file_name("token", token), {"token": token})

    def api(self, kubeconfig: Path | None = None) -> ApiClient:
        """A small JSON client, as the administrator or the user of ``kubeconfig``."""
        return ApiClient(kubeconfig or self.kubeconfig)

    def kubectl(
        self,
        *arguments: str,
        input: str | None = None,
        kubeconfig: Path | None = None,
        check: bool = True,
        timeout: float = 60.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl, as the administrator or the user of ``kubeconfig``, and return what it said.

        With ``check`` a refusal raises :class:`ControlPlaneError` with kubectl's error text.
        """
        # Not in the user's home: a discovery cache for this address may be another server's.
        command = [
            *(str(self._kubectl_path()), "--kubeconfig", str(kubeconfig or self.kubeconfig)),
            *("--cache-dir", str(self.root / "kubectl-cache"), *arguments),
        ]
        feed = {"stdin": subprocess.DEVNULL} if input is None else {"input": input}
        done: subprocess.CompletedProcess[str] = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, **feed
        )
        if check and done.returncode != 0:
            raise ControlPlaneError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done

    @property
    def kubectl_file(self) -> Path:
        """The kubectl that :meth:`kubectl` runs, for commands that call it by themselves."""
        return self._kubectl_path()

    @property
    def audit_log(self) -> Path:
        """The audit log: one JSON object (``audit.k8s.io/v1`` Event) per line and write."""
        if not self._audit:
            raise ControlPlaneError("writes are not recorded; start it with audit=True")
        return self.root / "audit.jsonl"

    def audit_events(self, since: int = 0) -> list[dict[str, Any]]:
        """The recorded writes from byte ``since`` of :attr:`audit_log` on, in order."""
        with self.audit_log.open("rb") as handle:
            handle.seek(since)
            # A line that is being written has no end yet.
            return [json.loads(line) for line in handle if line.endswith(b"\n")]

    # -- inside ----------------------------------------------------------------------------------

    def _kubectl_path(self) -> Path:
        if "kubectl" not in self._tools:
            self._tools["kubectl"] = tool_path("kubectl", log=self._log)
        return self._tools["kubectl"]

    def _kubeconfig(self, name: str, user: dict[str, str]) -> Path:
        path = self.root / "kubeconfigs" / name
        if not path.exists() or self.url not in path.read_text():
            write_kubeconfig(path, server=self.url, authority=self.ca_file, user=user)
        return path

    def _run(self, name: str, arguments: Sequence[str]) -> Process:
        process = Process(
            name,
            [self._tools[name], *arguments],
            log=self.root / f"{name}.log",
            cwd=self.root,
        )
        self._processes[name] = process
        return process

    def _start_etcd(self) -> None:
        socket = self.root / "etcd.sock"
        socket.unlink(missing_ok=True)
        (self.root / "etcd-peer.sock").unlink(missing_ok=True)
        process = self._run("etcd", flags.etcd())
        self._wait_for(process, socket.exists)

    def _start_on_some_port(self) -> None:
        for _ in range(10):
            self._port = free_port()
            process = self._run("kube-apiserver", self._apiserver_arguments())
            try:
                return self._until_ready(process)
            except ControlPlaneError:
                if not process.lost_its_port():
                    raise
        raise ControlPlaneError("ten ports in a row were taken while the API server started")

    def _apiserver_arguments(self) -> list[str]:
        given = flags.kube_apiserver(self._port)
        if self._audit:
            (self.root / "audit-policy.json").write_text(json.dumps(flags.AUDIT_POLICY))
            given += flags.audit()
        return [*given, *self._apiserver_flags]

    def _until_ready(self, process: Process) -> None:
        # Whatever else may listen on the port is not trusted, and not waited for.
        client = ApiClient(self.kubeconfig, timeout=2.0)

        def ready() -> bool:
            try:
                client.get("/readyz")
                return client.find("/api/v1/namespaces/default") is not None
            except (OSError, http.client.HTTPException, ApiError):
                return False

        try:
            self._wait_for(process, ready)
        finally:
            client.close()

    def _start_optional(self, name: str) -> None:
        match name:
            case "kube-controller-manager":
                user = self.user_kubeconfig("system:kube-controller-manager")
                process = self._run(name, flags.kube_controller_manager(user))
                account = "/api/v1/namespaces/default/serviceaccounts/default"
                client = self.api()
                self._wait_for(process, lambda: client.find(account) is not None)
                client.close()
            case "kube-scheduler":
                user = self.user_kubeconfig("system:kube-scheduler")
                self._run(name, flags.kube_scheduler(user))
            case "kwok":
                stages = self._tools["kwok-stages"]
                self._run(name, flags.kwok(self.kubeconfig, stages))

    def _wait_for(self, process: Process, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._start_timeout
        while process.running:
            if condition():
                return
            if time.monotonic() > deadline:
                raise ControlPlaneError(
                    f"{process.name} was not ready within {self._start_timeout:.0f} s"
                    f"{_end_of_log(process)}"
                )
            time.sleep(_POLL_SECONDS)
        raise _ended(process)


def _ended(process: Process) -> ControlPlaneError:
    return ControlPlaneError(
        f"{process.name} ended with status {process.exit_status}{_end_of_log(process)}"
    )


def _end_of_log(process: Process, lines: int = 15) -> str:
    said = process.said().splitlines()[-lines:]
    return f"; {process.log} ends:\n" + "\n".join(said) if said else f"; {process.log} is empty"
