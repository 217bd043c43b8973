"""Which folders are accepted as volumes; each refusal says what to do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kvtier_agent.storage.volume import Volume, VolumeError, check_mount, filesystem_of


def test_a_mount_of_its_own_is_accepted(mount):
    check_mount("data0", mount)


def test_a_missing_folder(tmp_path):
    with pytest.raises(VolumeError, match=r"data0: .* does not exist; mount the drive there first"):
        check_mount("data0", tmp_path / "nothing")


def test_a_file(mount):
    (mount / "file").write_text("")
    with pytest.raises(VolumeError, match="is not a directory"):
        check_mount("data0", mount / "file")


def test_a_symbolic_link_anywhere_in_the_path(mount):
    (mount / "real" / "inner").mkdir(parents=True)
    (mount / "link").symlink_to(mount / "real")
    for path in (mount / "link", mount / "link" / "inner"):
        with pytest.raises(VolumeError, match=f"symbolic link; give {mount}/real"):
            check_mount("data0", path)


def test_the_root_file_system(tmp_path):
    if tmp_path.stat().st_dev != Path("/").stat().st_dev:
        pytest.skip("the temporary folder is not on the root file system here")
    with pytest.raises(VolumeError, match=r"root file system|overlay") as caught:
        check_mount("data0", tmp_path)
    assert caught.value.reason == "VolumeUnusable"
    check_mount("data0", tmp_path, allow_root_filesystem=True)


@pytest.fixture
def read_only(tmp_path):
    """A file system that is mounted read-only: one of ours where we may mount, else one found."""
    folder = tmp_path / "read-only"
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "kvtier-test", str(folder)],
        capture_output=True,
        check=False,
    )
    if mount.returncode == 0:
        yield folder
        subprocess.run(["umount", str(folder)], check=True)
        return
    for path in (Path("/sys"), Path("/sys/fs/cgroup")):
        if path.is_dir() and os.statvfs(path).f_flag & os.ST_RDONLY:
            yield path
            return
    pytest.skip("no read-only mount on this machine, and none can be made")


def test_a_read_only_mount(read_only):
    with pytest.raises(VolumeError, match="read-only") as caught:
        check_mount("data0", read_only)
    assert caught.value.reason == "VolumeReadOnly"


def test_no_permission(mount):
    """As another user, since root may write everywhere."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    mount.chmod(0o755)
    child = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from kvtier_agent.storage.volume import VolumeError, check_mount\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "try: check_mount('data0', Path(sys.argv[1]))\n"
        "except VolumeError as error: print(error)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", child, str(mount)], capture_output=True, text=True, check=True
    ).stdout
    assert "is not writable for user 65534; change its owner" in out


def test_one_agent_at_a_time(mount):
    first = Volume("data0", mount, "d")
    with pytest.raises(VolumeError, match="in use by another agent") as caught:
        Volume("data0", mount, "d")
    assert caught.value.reason == "VolumeInUse"
    Volume("data0", mount, "other domain").close()
    first.close()
    Volume("data0", mount, "d").close()


def test_the_folder_is_private(mount):
    volume = Volume("data0", mount, "d")
    assert volume.folder.stat().st_mode & 0o777 == 0o700
    volume.close()


def test_a_link_planted_inside_the_volume_is_refused(mount, tmp_path):
    (mount / "kvtier").symlink_to(tmp_path)
    with pytest.raises(VolumeError, match="is a symbolic link; remove it"):
        Volume("data0", mount, "d")


def test_file_systems_are_told_apart(mount):
    assert filesystem_of(mount)[1] == "tmpfs"
