"""A variable with a program's prefix is one of its settings, or the program does not start."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from kvtier_cli.environment import strays

KNOWN = ("lease_seconds", "max_pages", "http")


def found(environment: dict[str, str]) -> list[str]:
    return list(strays(environment, "KVTIER_AGENT_", KNOWN))


def test_settings_are_known_whatever_their_case() -> None:
    assert found({"KVTIER_AGENT_HTTP": "x", "kvtier_agent_max_pages": "1", "PATH": "/bin"}) == []


def test_the_nearest_setting_is_named() -> None:
    assert found({"KVTIER_AGENT_LEASE_SECOND": "5", "KVTIER_AGENT_ZZZ": ""}) == [
        "KVTIER_AGENT_LEASE_SECOND in the environment is no setting: "
        "did you mean KVTIER_AGENT_LEASE_SECONDS?",
        "KVTIER_AGENT_ZZZ in the environment is no setting: remove it; --help lists all",
    ]


def test_what_kubernetes_adds_for_services_stops_nobody() -> None:
    """What the kubelet sets for the Services kvtier-agent, kvtier-agent-metrics and kvtier."""
    address = "10.0.0.7"
    environment = {}
    for service, port in (("KVTIER_AGENT", 9476), ("KVTIER_AGENT_METRICS", 80), ("KVTIER", 8080)):
        environment |= {
            f"{service}_SERVICE_HOST": address,
            f"{service}_SERVICE_PORT": str(port),
            f"{service}_SERVICE_PORT_HTTP": str(port),
            f"{service}_PORT": f"tcp://{address}:{port}",
            f"{service}_PORT_{port}_TCP": f"tcp://{address}:{port}",
            f"{service}_PORT_{port}_TCP_PROTO": "tcp",
            f"{service}_PORT_{port}_TCP_PORT": str(port),
            f"{service}_PORT_{port}_TCP_ADDR": address,
        }
    assert found(environment) == []


def test_a_port_that_somebody_wrote_is_no_service() -> None:
    assert len(found({"KVTIER_AGENT_HTTP_PORT": "9476", "KVTIER_AGENT_PORT": "9476"})) == 2


@pytest.mark.parametrize(
    ("program", "variable", "near"),
    [
        ("agent", "KVTIER_AGENT_LEASE_SECOND", "KVTIER_AGENT_LEASE_SECONDS"),
        (
            "operator",
            "KVTIER_OPERATOR_REVISION_HISTROY_LIMIT",
            "KVTIER_OPERATOR_REVISION_HISTORY_LIMIT",
        ),
    ],
)
def test_both_programs_refuse_an_unknown_variable(program: str, variable: str, near: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvtier_cli.main", program, "--kubeconfig", "/nowhere"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, variable: "20", f"KVTIER_{program.upper()}_SERVICE_HOST": "10.0.0.7"},
    )
    assert done.returncode == 1
    assert done.stderr == (
        f"error: {variable} in the environment is no setting: did you mean {near}?\n"
    )
