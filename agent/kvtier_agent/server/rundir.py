"""The folder of the sockets: one agent per folder, one socket per trust domain.

The folder is locked (``agent.lock``, ``flock``) for as long as the agent lives, so a second agent
on it ends with one clear line. A socket file left behind by an agent that was killed is replaced;
one on which somebody listens is not, whatever the lock says (another program may have made it).

Mode and group are what keeps trust domains apart: 0660 and the domain's gid on each socket.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import zmq

from kvtier_agent.folder_lock import FolderLockError, lock_folder
from kvtier_agent.server.connection import is_live
from kvtier_agent.server.settings import ServerError, ServerSettings

SOCKET_MODE: Final = 0o660
LONGEST_PATH: Final = 107
"""What fits into a Unix socket's address, bytes."""
BACKLOG: Final = 128


def table_path(run_dir: Path, domain: str) -> Path:
    """Where the page table of a trust domain is found: a file, or a link to where it lies."""
    return run_dir / f"{domain}.pages"


class RunDir:
    """The locked folder; ``close`` gives it up."""

    def __init__(self, path: Path) -> None:
        """Makes the folder where it is missing. ``ServerError`` says what to do otherwise."""
        self.path = path
        try:
            path.mkdir(mode=0o755, parents=True, exist_ok=True)
        except OSError as error:
            raise ServerError(
                f"run folder {path}: {error.strerror}; choose a folder you may write with --run-dir"
            ) from None
        try:
            self._lock = lock_folder(path, "run folder", "--run-dir")
        except FolderLockError as error:
            raise ServerError(str(error)) from None

    def message_socket(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        name: str,
        gid: int | None,
        settings: ServerSettings,
    ) -> zmq.Socket[bytes]:
        """A ROUTER bound to ``<name>.sock``."""
        path = self._free(f"{name}.sock")
        router = context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, settings.max_frame_bytes),
            (zmq.SNDHWM, settings.high_water_mark),
            (zmq.RCVHWM, settings.most_waiting),
            # An answer that cannot be delivered is an error to count, not a silent loss.
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.HANDSHAKE_IVL, 2000),
        ):
            router.setsockopt(option, value)
        try:
            with _private_umask():
                router.bind(f"ipc://{path}")
            _share(path, gid)
        except (zmq.ZMQError, OSError) as error:
            router.close(0)
            raise ServerError(f"socket {path}: {error}") from None
        return router

    def lifeline_socket(self, name: str, gid: int | None) -> socket.socket:
        """A listening stream socket, ``<name>.life``."""
        path = self._free(f"{name}.life")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            with _private_umask():
                listener.bind(str(path))
            _share(path, gid)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise ServerError(f"socket {path}: {error.strerror or error}") from None
        return listener

    def show_table(self, name: str, table: Path) -> None:
        """Let ``kvtier inspect`` find a domain's page table, wherever it lies."""
        link = table_path(self.path, name)
        if table != link:
            with contextlib.suppress(OSError):  # a convenience: no reason not to serve
                link.unlink(missing_ok=True)
                link.symlink_to(table)

    def close(self, names: list[str]) -> None:
        """Remove the sockets and table links of these domains and unlock the folder."""
        for name in names:
            link = table_path(self.path, name)
            for path in (self.path / f"{name}.sock", self.path / f"{name}.life", link):
                with contextlib.suppress(OSError):
                    if path != link or path.is_symlink():
                        path.unlink()
        with contextlib.suppress(OSError):
            os.close(self._lock)

    def _free(self, name: str) -> Path:
        """The path for a socket, cleared of a dead one."""
        path = self.path / name
        if len(os.fsencode(path)) > LONGEST_PATH:
            raise ServerError(
                f"socket path {path} is longer than {LONGEST_PATH} bytes;"
                " choose a shorter folder with --run-dir"
            )
        if not path.exists() and not path.is_symlink():
            return path
        if not path.is_socket():
            raise ServerError(f"{path} exists and is no socket; remove it")
        if is_live(path):
            raise ServerError(
                f"socket {path} is in use; stop what listens there, or choose another --run-dir"
            )
        path.unlink()
        return path


@contextlib.contextmanager
def _private_umask() -> Iterator[None]:
    """Between bind and chmod a socket must not be open to everybody."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


def _share(path: Path, gid: int | None) -> None:
    """Let the domain's group in; the group first, so that no other group ever has access."""
    if gid is not None:
        try:
            os.chown(path, -1, gid)
        except PermissionError:
            raise ServerError(
                f"socket {path} cannot be given to group {gid};"
                " run the agent as root or as a member of that group"
            ) from None
    path.chmod(SOCKET_MODE)
