"""Answers of the API server, told apart by what to do about them."""

from __future__ import annotations

import pytest
from kvtier_operator.apply import errors
from kvtier_operator.apply.client import CONTROLLER_REVISIONS, KVTIER_POLICIES, Resource


@pytest.mark.parametrize(
    ("code", "body", "kind"),
    [
        (404, {"reason": "NotFound"}, errors.NotFound),
        (409, {"reason": "AlreadyExists", "message": "exists"}, errors.AlreadyExists),
        (
            409,
            {"reason": "Conflict", "message": "the object has been modified; please apply"},
            errors.Stale,
        ),
        (
            409,
            {"reason": "Conflict", "message": "uid mismatch: the provided object specified uid"},
            errors.Stale,
        ),
        (
            409,
            {"reason": "Conflict", "message": "Apply failed with 1 conflict: conflict with x"},
            errors.FieldConflict,
        ),
        (
            409,
            {"reason": "Conflict", "details": {"causes": [{"reason": "FieldManagerConflict"}]}},
            errors.FieldConflict,
        ),
        (422, {"reason": "Invalid"}, errors.Invalid),
        (400, {"reason": "BadRequest"}, errors.Invalid),
        (403, {"reason": "Forbidden"}, errors.Forbidden),
        (401, {"reason": "Unauthorized"}, errors.Forbidden),
        (410, {"reason": "Expired"}, errors.Gone),
        (429, {"reason": "TooManyRequests"}, errors.Overloaded),
        (500, {}, errors.Overloaded),
        (504, {}, errors.Overloaded),
        (418, {}, errors.ApiError),
    ],
)
def test_each_answer_has_its_kind(code: int, body: dict[str, object], kind: type) -> None:
    assert type(errors.from_response(code, body)) is kind


def test_the_server_says_when_to_come_back() -> None:
    assert errors.from_response(429, {}, {"Retry-After": "7"}).retry_after == 7.0
    assert errors.from_response(429, {"details": {"retryAfterSeconds": 3}}).retry_after == 3.0
    assert errors.from_response(429, {}, {"Retry-After": "soon"}).retry_after == 0.0


def test_paths() -> None:
    assert KVTIER_POLICIES.path("p", subresource="status") == (
        "/apis/kvtier.io/v1alpha1/kvtierpolicies/p/status"
    )
    assert CONTROLLER_REVISIONS.path(namespace="ns") == (
        "/apis/apps/v1/namespaces/ns/controllerrevisions"
    )
    assert Resource("v1", "Node", "nodes").path("n") == "/api/v1/nodes/n"
