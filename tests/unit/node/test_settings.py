"""Settings: said once, shown by --help, refused with a sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kvtier_agent.settings import AgentSettings, Domain, HttpAddress, VolumeMapping
from kvtier_cli import options
from kvtier_cli.agent import app
from typer.testing import CliRunner

RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.delenv("NODE_NAME", raising=False)


def read(**given: Any) -> AgentSettings:
    made: AgentSettings = options.read_settings(AgentSettings, given)
    return made


def test_every_knob_says_unit_bounds_default_and_environment() -> None:
    for name, field in AgentSettings.model_fields.items():
        text = options.describe(name, field, AgentSettings)
        assert f"env: KVTIER_AGENT_{name.upper()}" in text, name
        assert "default: " in text, name
        if field.annotation in (int, float):
            assert "unit: " in text, name
            assert "at least" in text, name
            assert "at most" in text, name


def test_help_shows_every_knob() -> None:
    shown = RUNNER.invoke(app, ["--help"])
    assert shown.exit_code == 0
    for name, field in AgentSettings.model_fields.items():
        assert f"--{name.replace('_', '-')}" in shown.output, name
        assert str(field.description)[:20] in shown.output, name


def test_reading_settings_imports_nothing_heavy() -> None:
    code = (
        "import sys, kvtier_cli.agent; "
        "print(sorted({'torch', 'kubernetes', 'kopf', 'zmq', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_command_line_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_AGENT_LEASE_SECONDS", "5")
    monkeypatch.setenv("KVTIER_AGENT_VOLUME", "a=/x,b=/y")
    monkeypatch.setenv("KVTIER_AGENT_DOMAIN", "one,two:2000")
    monkeypatch.setenv("NODE_NAME", "node-1")
    from_env = read()
    assert from_env.lease_seconds == 5
    assert from_env.volume == (VolumeMapping("a", Path("/x")), VolumeMapping("b", Path("/y")))
    assert from_env.domain == (Domain("one"), Domain("two", 2000))
    assert from_env.node_name == "node-1"
    assert not from_env.standalone
    given = read(lease_seconds="7", volume=["c=/z"], node_name="node-2", device_memory="3Gi")
    assert given.lease_seconds == 7
    assert given.volume == (VolumeMapping("c", Path("/z")),)
    assert given.node_name == "node-2"
    assert given.device_memory == 3 << 30


def test_a_policy_file_wins_over_a_node_name_in_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NODE_NAME", "node-1")
    assert read(policy="p.yaml").standalone


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "--policy FILE to run alone, or --node-name NAME"),
        ({"policy": "p", "kubeconfig": "k"}, "--kubeconfig goes with --node-name"),
        ({"policy": "p", "lease_seconds": "0"}, "--lease-seconds: write at least 1, not '0'"),
        ({"policy": "p", "lease_seconds": "soon"}, "--lease-seconds: write a number"),
        ({"policy": "p", "device_memory": "2 gigs"}, "--device-memory: '2 gigs' is not a size"),
        ({"policy": "p", "device": "gpu"}, "--device: write auto, cpu or cuda"),
        ({"policy": "p", "volume": ["data0"]}, "write name=DIR"),
        ({"policy": "p", "volume": ["a=/x", "a=/y"]}, "volume a is given twice"),
        ({"policy": "p", "volume": ["a=/x/y", "b=/x/./z/../y/"]}, "a and b are one folder"),
        ({"policy": "p", "volume": ["a=/proc/self/..", "b=/proc"]}, "a and b are one folder"),
        ({"policy": "p", "domain": ["A"]}, "write NAME or NAME:GID"),
        ({"policy": "p", "domain": ["a:x"]}, "write NAME or NAME:GID"),
        ({"policy": "p", "domain": ["a", "a:1"]}, "domain a is given twice"),
        ({"policy": "p", "http": "localhost"}, "write HOST:PORT"),
        ({"policy": "p", "http": "localhost:99999"}, "write HOST:PORT"),
        ({"policy": "p", "run_dir": "/" + "x" * 100}, "too long for a Unix socket"),
        ({"node_name": "Node_1"}, "--node-name: write a name that matches"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_the_option(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=r"--|twice") as e:
        read(**given)
    assert says in str(e.value)
    assert "\n" not in str(e.value)


def test_a_mistake_in_node_name_from_the_environment_names_the_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NODE_NAME", "Node_1")
    with pytest.raises(ValueError, match=r"^--node-name: write a name"):
        read()


def test_addresses() -> None:
    assert HttpAddress.parse("[::1]:80") == HttpAddress("::1", 80)
    assert str(HttpAddress("::1", 80)) == "[::1]:80"
    assert HttpAddress.parse(":9476").host == "0.0.0.0"


def test_settings_do_not_change() -> None:
    with pytest.raises(Exception, match="frozen"):
        read(policy="p").lease_seconds = 3.0  # type: ignore[misc]


def test_a_group_that_no_kernel_knows_is_refused() -> None:
    assert Domain.parse(f"search:{(1 << 32) - 2}").gid == (1 << 32) - 2
    with pytest.raises(ValueError, match="write NAME or NAME:GID"):
        Domain.parse(f"search:{(1 << 32) - 1}")
