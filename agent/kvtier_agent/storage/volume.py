"""Volumes: from a policy's name to a folder that is safe to fill.

A policy names volumes; the chart or `--volume NAME=DIR` says where they are mounted. A mount that
is missing, no directory, read-only, not writable, reached through a symbolic link, of a kind that
stores no files (/proc), or on the root file system or an overlay (the node's or the container's own
disk, which others need) is refused with what to do, however much room there is. Pages lie in
`<mount>/kvtier/<domain>/`, mode 0700, locked against a second agent.

Before each write two things are checked: the cap, in bytes of allocated blocks, and the reserve,
the part of the file system that stays free for others.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path

from kvtier_agent.storage.fileio import FileIO
from kvtier_agent.storage.volume_health import VolumeHealth

LOCK_NAME = "lock"
PROOF_NAME = "proof.tmp"
PROOF_BYTES = 4096

_REASONS = {
    errno.ENOSPC: "VolumeFull",
    errno.EDQUOT: "VolumeFull",
    errno.EROFS: "VolumeReadOnly",
}


class VolumeError(Exception):
    """A volume cannot be used; one line that says what to do. `reason`: the condition's reason;
    `volume`: its name, where whoever catches this cannot know."""

    def __init__(self, message: str, reason: str = "VolumeUnusable") -> None:
        super().__init__(message)
        self.reason = reason
        self.volume = ""


def refused(name: str, what: str, error: OSError) -> VolumeError:
    """`error` of the volume `name` as a VolumeError, with the condition's reason. `what`: could not
    be done."""
    reason = _REASONS.get(error.errno or 0, "VolumeUnusable")
    made = VolumeError(f"volume {name}: {what}: {error.strerror or error}", reason)
    made.volume = name
    return made


def filesystem_of(path: Path) -> tuple[str, str]:
    """(mount point, type) of the file system that holds `path`, from /proc/self/mountinfo."""
    best = ("/", "unknown")
    resolved = str(path.resolve())
    with Path("/proc/self/mountinfo").open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            left, _, right = line.partition(" - ")
            mount = left.split()[4].encode().decode("unicode_escape")
            inside = resolved == mount or resolved.startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= len(best[0]):
                best = (mount, right.split()[0])
    return best


def check_mount(name: str, mount: Path, *, allow_root_filesystem: bool = False) -> None:
    """Raise VolumeError unless `mount` may be used."""
    where = f"volume {name}: {mount}"
    try:
        mode = mount.lstat().st_mode
    except FileNotFoundError:
        raise VolumeError(f"{where} does not exist; mount the drive there first") from None
    except OSError as error:
        raise VolumeError(f"{where}: {error.strerror}; check its permissions") from error
    absolute = Path(os.path.abspath(mount))  # noqa: PTH100 - resolve() would follow the links
    if stat.S_ISLNK(mode) or absolute.resolve() != absolute:
        raise VolumeError(f"{where} is reached through a symbolic link; give {mount.resolve()}")
    if not stat.S_ISDIR(mode):
        raise VolumeError(f"{where} is not a directory; give the folder where the drive is mounted")
    found = os.statvfs(mount)
    if found.f_flag & os.ST_RDONLY:
        raise VolumeError(f"{where} is mounted read-only; mount it read-write", "VolumeReadOnly")
    if not found.f_blocks:
        raise VolumeError(
            f"{where} is on a {filesystem_of(mount)[1]} file system, which stores no files; mount a"
            " drive there"
        )
    if not os.access(mount, os.W_OK | os.X_OK):
        raise VolumeError(f"{where} is not writable for user {os.geteuid()}; change its owner")
    if allow_root_filesystem:
        return
    point, kind = filesystem_of(mount)
    if kind == "overlay":
        raise VolumeError(
            f"{where} is on an overlay file system (the container's own layer); mount a drive there"
        )
    if point == "/" or mount.stat().st_dev == Path("/").stat().st_dev:
        raise VolumeError(
            f"{where} is on the root file system, which the node needs; mount a drive there"
            " (alone: --allow-root-filesystem)"
        )


class Volume:
    """One locked folder of one trust domain on one volume."""

    def __init__(
        self,
        name: str,
        mount: Path,
        domain: str,
        *,
        allow_root_filesystem: bool = False,
        io: FileIO | None = None,
    ) -> None:
        """Checks the mount, makes the folder and locks it. Raises VolumeError."""
        self.name = name
        self.health = VolumeHealth(name)
        self.io = io or FileIO()
        check_mount(name, mount, allow_root_filesystem=allow_root_filesystem)
        self.folder = mount / "kvtier" / domain
        try:
            for folder in (self.folder.parent, self.folder):
                folder.mkdir(mode=0o700, exist_ok=True)
                if folder.is_symlink():
                    raise VolumeError(f"volume {name}: {folder} is a symbolic link; remove it")
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._lock = os.open(self.folder / LOCK_NAME, flags, 0o600)
        except OSError as error:
            raise refused(name, f"cannot use {self.folder}", error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise VolumeError(
                f"volume {name}: {self.folder} is in use by another agent; stop that one, or give"
                " this agent a volume of its own",
                "VolumeInUse",
            ) from None

    def prove(self) -> None:
        """Write a block, have it flushed, and remove it. Raises VolumeError."""
        path = self.folder / PROOF_NAME
        try:
            fd, _ = self.io.open(path, create=True, direct=False)
            try:
                if self.io.write(fd, [bytes(PROOF_BYTES)], 0) != PROOF_BYTES:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self.io.flush(fd)
            finally:
                self.io.close(fd)
                with contextlib.suppress(OSError):
                    self.io.unlink(path)
        except OSError as error:
            raise refused(self.name, f"cannot write to {self.folder}", error) from error

    @property
    def read_only(self) -> bool:
        """The last write was refused with EROFS: an error of the drive may have done that."""
        trouble = self.health.trouble
        return trouble is not None and trouble.reason == "VolumeReadOnly"

    def keeps_reserve(self, new_bytes: int, reserve_percent: int) -> bool:
        """Would `reserve_percent` of the file system still be free after `new_bytes` more?"""
        free, size = self.io.free(self.folder)
        return free - new_bytes >= size * reserve_percent // 100

    def close(self) -> None:
        """Unlock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
