"""Revision hashes are part of the contract: these never change within an API version."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from kvtier_api import KVTierPolicy, revision_hash
from kvtier_api.revision import canonical
from specgen import policy

VECTORS = json.loads((Path(__file__).parent / "vectors" / "revision_hash.json").read_text())


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_vectors(vector: dict[str, Any]) -> None:
    spec = KVTierPolicy.read(policy(vector["spec"])).spec
    assert canonical(spec) == json.loads(vector["canonical"])
    assert revision_hash(spec) == vector["hash"]
    assert hashlib.sha256(vector["canonical"].encode()).hexdigest() == vector["hash"]


def test_vectors_that_mean_the_same_have_one_hash() -> None:
    by_name = {vector["name"]: vector["hash"] for vector in VECTORS}
    assert by_name["least"] == by_name["all defaults written"] == by_name["control input"]
    assert by_name["sizes"] == by_name["sizes spelt otherwise"]
    assert len(set(by_name.values())) == len(VECTORS) - 3
