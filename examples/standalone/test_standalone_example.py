"""The example as its README tells it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from agent_process import AgentProcess

HERE = Path(__file__).parent


def test_the_example_runs_as_written(tmp_path: Path) -> None:
    with AgentProcess(tmp_path, policy=(HERE / "policy.yaml").read_text()) as agent:
        agent.ready()
        done = subprocess.run(
            [sys.executable, HERE / "store_and_load.py", agent.socket],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        readme = (HERE / "README.md").read_text()
        for line in done.stdout.splitlines():
            assert line in readme
        agent.until(lambda: agent.status().get("tiers"), "tiers are shown")
        first = agent.status()["revision"]
        agent.write_policy((HERE / "policy.yaml").read_text().replace("256Mi", "512Mi"))
        agent.until(
            lambda: agent.status().get("revision") not in (None, "", first), "the edit is live"
        )
        assert agent.stop() == 0


def test_without_an_agent_the_example_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _IMPATIENT, HERE / "store_and_load.py", tmp_path / "x.sock"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "no agent answers" in done.stderr
    assert "Traceback" not in done.stderr


_IMPATIENT = """
import runpy, sys
from pathlib import Path
from kvtier_agent.server.client import Client
Client.wait_connected = lambda self, seconds: False
main = runpy.run_path(sys.argv[1])["main"]
sys.exit(main(Path(sys.argv[2])))
"""
