"""The values that the installation page shows work on a cluster that has what the page asks for."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml


@pytest.fixture(scope="module")
def shown(root: Path) -> list[dict[str, Any]]:
    """Values in the page, in its order; pieces of Pods are none."""
    text = (root / "docs/administrator/install.md").read_text("utf-8")
    blocks = [yaml.safe_load(b) for b in re.findall(r"^```yaml\n(.*?)^```", text, re.S | re.M)]
    return [block for block in blocks if "spec" not in block]


def test_the_values_of_the_page_need_nobody_elses_api_types(
    render: Callable[..., Any], shown: list[dict[str, Any]]
) -> None:
    groups = {o["apiVersion"].partition("/")[0] for o in render(shown[0]).objects}
    own = {"apps", "v1", "rbac.authorization.k8s.io", "apiextensions.k8s.io"}
    assert groups <= own | {"admissionregistration.k8s.io"}


def test_what_the_page_adds_later_renders(
    render: Callable[..., Any], shown: list[dict[str, Any]]
) -> None:
    assert len(shown) >= 3
    for more in shown[1:]:
        render({**shown[0], **more})
