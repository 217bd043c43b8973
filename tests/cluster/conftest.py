"""Fixtures for tests against a real API server.

Everything under this folder is marked ``cluster``. Tests share one control plane; what a test
leaves behind is deleted after it. A tool that is missing is built, before the first test and
outside of its time limit; one that cannot be built fails the tests that need it, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from controlplane import ControlPlane, ToolError, tool_path
from controlplane.launcher import OPTIONAL
from controlplane.testing import Kube, Sweeper

HERE = Path(__file__).parent
CRDS = HERE.parents[1] / "crds"

_BASE = ("pki", "etcd", "kube-apiserver", "kubectl")
_NEEDS: dict[str, tuple[str, ...]] = {
    "control_plane": _BASE,
    "full_control_plane": (*_BASE, *OPTIONAL, "kwok-stages"),
    "helm": ("helm",),
    "promtool": ("promtool",),
}
"""Fixture -> the tools that have to be there before it is used."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build what the selected tests need; minutes on a new machine, nothing later on."""
    if session.config.option.collectonly:
        return
    used = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    tools = dict.fromkeys(tool for name in _NEEDS if name in used for tool in _NEEDS[name])
    capture = session.config.pluginmanager.getplugin("capturemanager")
    assert capture is not None
    with capture.global_and_fixture_disabled():
        for tool in tools:
            try:
                tool_path(tool)
            except ToolError as error:
                # The fixture raises it again, in the tests that need the tool.
                print(error)
                return


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """etcd and kube-apiserver, RBAC on, writes recorded; shared by the whole run."""
    with ControlPlane(tmp_path_factory.mktemp("control-plane"), audit=True) as plane:
        yield plane


@pytest.fixture(scope="session")
def full_control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """One with controllers, a scheduler, and kwok, which plays the kubelet of fake nodes."""
    root = tmp_path_factory.mktemp("full-control-plane")
    with ControlPlane(root, with_=OPTIONAL, audit=True) as plane:
        yield plane


@pytest.fixture(scope="session")
def admin_kubeconfig(control_plane: ControlPlane) -> Path:
    """The kubeconfig of an administrator of the shared control plane."""
    return control_plane.kubeconfig


@pytest.fixture
def kube(control_plane: ControlPlane) -> Iterator[Kube]:
    """The shared control plane with kvtier's CRDs and none of any other test's objects."""
    # An earlier test may have failed during an outage that it made.
    control_plane.start_apiserver()
    helper = Kube(control_plane)
    helper.define(yaml.safe_load(path.read_text()) for path in sorted(CRDS.glob("*.yaml")))
    sweeper = Sweeper(helper)
    yield helper
    control_plane.start_apiserver()
    sweeper.sweep()
    helper.api.close()


@pytest.fixture(scope="session")
def helm() -> Path:
    """The helm program."""
    return tool_path("helm")


@pytest.fixture(scope="session")
def promtool() -> Path:
    """The promtool program."""
    return tool_path("promtool")
