"""``metadata`` offline and at the real API server: what one refuses, the other refuses."""

from __future__ import annotations

from typing import Any

from controlplane.api import ApiError
from controlplane.testing import Kube
from kvtier_api import validate
from metadata_cases import ACCEPTED, REFUSED
from specgen import policy


def refusal(kube: Kube, obj: dict[str, Any]) -> str | None:
    """What the API server says against an object, or None. Nothing is written."""
    path = f"/apis/{obj['apiVersion']}/kvtierpolicies"
    try:
        kube.api.request("POST", f"{path}?dryRun=All&fieldValidation=Strict", obj)
    except ApiError as error:
        return error.message
    return None


def with_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    obj = policy({"valueDensity": {"model": "classic"}})
    obj["metadata"] = {**obj["metadata"], **metadata}
    return obj


def test_metadata_agrees_with_the_api_server(kube: Kube) -> None:
    """One test over all cases: what a single one costs is the clean slate before it."""
    wrong = {}
    for name, (metadata, _) in REFUSED.items():
        obj = with_metadata(metadata)
        if refusal(kube, obj) is None or not validate(obj):
            wrong[name] = (refusal(kube, obj), validate(obj))
    for name, metadata in ACCEPTED.items():
        obj = with_metadata(metadata)
        if (said := refusal(kube, obj)) or validate(obj):
            wrong[name] = (said, validate(obj))
    assert wrong == {}
