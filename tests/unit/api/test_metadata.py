"""``metadata`` is checked as an API server does; tests/cluster/api asks a real one the same."""

from __future__ import annotations

import pytest
from kvtier_api import object_meta, validate
from metadata_cases import ACCEPTED, REFUSED, Metadata
from specgen import policy


@pytest.mark.parametrize(("metadata", "path"), REFUSED.values(), ids=REFUSED)
def test_what_an_api_server_refuses_is_one_problem(metadata: Metadata, path: str) -> None:
    obj = policy({"valueDensity": {"model": "classic"}})
    obj["metadata"].update(metadata)
    (problem,) = validate(obj)
    assert problem.path == path


@pytest.mark.parametrize("metadata", ACCEPTED.values(), ids=ACCEPTED)
def test_what_an_api_server_takes_is_no_problem(metadata: Metadata) -> None:
    obj = policy({"valueDensity": {"model": "classic"}})
    obj["metadata"].update(metadata)
    assert validate(obj) == []


def test_the_size_of_annotations_is_said() -> None:
    most = object_meta.MAX_ANNOTATION_BYTES
    found = dict(object_meta.problems({"name": "a", "annotations": {"a": "x" * most}}))
    assert found == {
        "metadata.annotations": f"{most + 1} bytes in all: the API server takes {most}"
    }
