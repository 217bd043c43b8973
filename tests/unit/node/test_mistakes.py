"""A user's mistake at the start of an agent: one line that says what to do, exit status 1."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from kvtier_agent.node import facts
from kvtier_agent.node.errors import StartError
from kvtier_agent.node.facts import VolumeFacts
from kvtier_agent.node.main import Agent
from kvtier_agent.settings import AgentSettings
from kvtier_cli.options import read_settings

POLICY = """
apiVersion: kvtier.io/v1alpha1
kind: KVTierPolicy
metadata: {name: alone}
spec:
  tiers: {hbm: {size: 4Mi}, dram: {size: 8Mi}, NVME}
  valueDensity: {model: classic}
"""

NVME = "nvme: {size: 16Mi, volumes: [data0], reservePercent: 0}"
"""The reserve is not what these are about: the temporary folder may be nearly full."""
POLICY = POLICY.replace("NVME", NVME)

Start = Callable[..., str]


@pytest.fixture(params=["room", "no room"])
def room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong with a volume is wrong on a full file system too."""
    if request.param == "no room":
        full = VolumeFacts(total=1 << 30, available=0)
        monkeypatch.setattr(facts, "volume_facts", lambda *_, **__: full)


@pytest.fixture
def mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts an agent that is expected to refuse; returns the one line it says."""
    monkeypatch.delenv("NODE_NAME", raising=False)
    (tmp_path / "policy.yaml").write_text(POLICY)
    (tmp_path / "data0").mkdir()
    defaults = {
        "policy": tmp_path / "policy.yaml",
        "run_dir": tmp_path / "run",
        "state_dir": tmp_path / "state",
        "shm_dir": tmp_path,
        "volume": [f"data0={tmp_path / 'data0'}"],
        "http": "127.0.0.1:0",
        "device": "cpu",
        "allow_root_filesystem": True,
    }

    def start(*, without: str = "", **changes: object) -> str:
        given = {k: v for k, v in (defaults | changes).items() if k != without}
        agent = Agent(read_settings(AgentSettings, given))
        try:
            with pytest.raises(StartError) as e:
                agent.start()
        finally:
            agent.stop()
        assert "\n" not in str(e.value)
        assert agent.supervisor.names() == []
        return str(e.value)

    return start


def test_a_mistake_is_one_line_and_exit_status_1(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "NODE_NAME"}
    done = subprocess.run(
        [sys.executable, "-m", "kvtier_cli.main", "agent", "--policy", tmp_path / "none.yaml"],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    said = [x for x in done.stderr.splitlines() if not x.startswith("{")]
    assert said == [
        f"error: cannot read policy {tmp_path / 'none.yaml'}: No such file or directory; "
        "give --policy a file that holds a KVTierPolicy"
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "--policy"),
        (["--policy", "p.yaml", "--volume", "data0"], "--volume: "),
        (["--policy", "p.yaml", "--http", "nonsense"], "--http: "),
        (["--policy", "p.yaml", "--lease-seconds", "soon"], "--lease-seconds: write a number"),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_status_2(arguments: list[str], sentence: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvtier_cli.main", "agent", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={k: v for k, v in os.environ.items() if k != "NODE_NAME"},
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert sentence in line


def test_the_policy_file_is_missing(mistake: Start, tmp_path: Path) -> None:
    said = mistake(policy=tmp_path / "none.yaml")
    assert "No such file or directory; give --policy a file" in said


def test_the_policy_file_is_not_yaml(mistake: Start, tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("spec:\n  tiers: [")
    assert "policy.yaml: line 2: is not YAML" in mistake()


def test_the_policy_file_is_a_pipe_that_nobody_writes_to(mistake: Start, tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").unlink()
    os.mkfifo(tmp_path / "policy.yaml")
    assert "policy.yaml is no regular file; give --policy a file" in mistake()


def test_the_policy_is_invalid(mistake: Start, tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(POLICY.replace("tiers:", "tires:"))
    assert "spec.tires: unknown field, did you mean tiers?" in mistake()


def test_a_volume_is_not_mapped(mistake: Start) -> None:
    said = mistake(without="volume")
    assert "volume data0 is not mapped on this node" in said
    assert "--volume data0=DIR" in said


def test_a_volume_is_missing(mistake: Start, tmp_path: Path) -> None:
    said = mistake(volume=[f"data0={tmp_path / 'none'}"])
    assert "data0" in said
    assert "No such file or directory" in said or "does not exist" in said


@pytest.mark.usefixtures("room")
def test_a_volume_on_the_root_filesystem(mistake: Start, tmp_path: Path) -> None:
    if tmp_path.stat().st_dev != Path("/").stat().st_dev:
        pytest.skip("the temporary folder is not on the root filesystem here")
    assert "--allow-root-filesystem" in mistake(allow_root_filesystem=False)


@pytest.mark.usefixtures("room")
def test_a_volume_behind_a_symbolic_link(mistake: Start, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "data0")
    said = mistake(volume=[f"data0={tmp_path / 'link'}"])
    assert "symbolic link" in said


@pytest.mark.usefixtures("room")
def test_a_volume_that_is_a_file(mistake: Start, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = mistake(volume=[f"data0={tmp_path / 'file'}"])
    assert "not a directory" in said


@pytest.mark.usefixtures("room")
def test_a_volume_on_a_filesystem_that_stores_nothing(mistake: Start) -> None:
    assert "/proc is on a proc file system, which stores no files" in mistake(
        volume=["data0=/proc"]
    )


@pytest.mark.usefixtures("room")
def test_a_volume_of_another_agent(mistake: Start, tmp_path: Path) -> None:
    folder = tmp_path / "data0" / "kvtier" / "default"
    folder.mkdir(parents=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "in use by another agent" in mistake()


def test_a_second_agent_on_the_same_folders(mistake: Start, tmp_path: Path) -> None:
    for name, option in (("state", "--state-dir"), ("run", "--run-dir")):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        with (folder / "agent.lock").open("w") as lock:
            lock.write("4711\n")
            lock.flush()
            fcntl.flock(lock, fcntl.LOCK_EX)
            said = mistake()
            assert "in use by another agent (pid 4711)" in said
            assert option in said


def test_a_socket_in_use(mistake: Start, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(str(tmp_path / "run" / "default.sock"))
        taken.listen()
        assert "default.sock is in use" in mistake()


def test_the_http_port_is_taken(mistake: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = mistake(http=f"127.0.0.1:{taken.getsockname()[1]}")
        assert "cannot serve HTTP" in said
        assert "--http" in said


def test_a_folder_cannot_be_made(mistake: Start, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "--state-dir" in mistake(state_dir=tmp_path / "file" / "state")
    assert "--run-dir" in mistake(run_dir=tmp_path / "file" / "run")
    assert "--shm-dir" in mistake(shm_dir=tmp_path / "nowhere")


def test_cuda_where_there_is_none(mistake: Start) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    assert "run it with --device cpu" in mistake(device="cuda")


def test_a_kubeconfig_that_is_not_there(mistake: Start, tmp_path: Path) -> None:
    said = mistake(node_name="node-a", without="policy", kubeconfig=tmp_path / "none.yaml")
    assert f"cannot use kubeconfig {tmp_path / 'none.yaml'}: No such file or directory" in said


@pytest.mark.parametrize("text", ["clusters: [", "- a", "current-context: x\ncontexts: 3"])
def test_a_kubeconfig_that_is_none(mistake: Start, tmp_path: Path, text: str) -> None:
    (tmp_path / "config").write_text(text)
    said = mistake(node_name="node-a", without="policy", kubeconfig=tmp_path / "config")
    assert f"cannot use kubeconfig {tmp_path / 'config'}: " in said


def test_kubernetes_outside_a_pod(mistake: Start) -> None:
    said = mistake(node_name="node-a", without="policy")
    assert "outside a Pod give --kubeconfig FILE" in said
