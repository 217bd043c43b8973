"""What can go wrong with a request to the API server, told apart by what to do about it.

409 has two meanings that need opposite answers: the object has moved on since it was read (read
again, decide again) or another field manager owns a field (only possible without ``force``, so a
bug). The status object does not say which; its message does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = [
    "AlreadyExists",
    "ApiError",
    "FieldConflict",
    "Forbidden",
    "Gone",
    "Invalid",
    "NotFound",
    "Overloaded",
    "Stale",
    "Unreachable",
    "from_response",
]


class ApiError(Exception):
    """The API server refused. ``code`` is the HTTP status, ``reason`` the machine's word."""

    def __init__(self, code: int, reason: str, message: str, retry_after: float = 0.0) -> None:
        super().__init__(f"{code} {reason}: {message}")
        self.code = code
        self.reason = reason
        self.message = message
        self.retry_after = retry_after


class NotFound(ApiError):
    """404: the object, or the kind, does not exist."""


class AlreadyExists(ApiError):
    """409 on create: an object of that name exists."""


class Stale(ApiError):
    """409: the object has moved on since it was read, or is another one of the same name."""


class FieldConflict(ApiError):
    """409: another field manager owns a field of an unforced apply."""


class Invalid(ApiError):
    """400 or 422: the server will never take this body; sending it again is pointless."""


class Forbidden(ApiError):
    """401 or 403: credentials or RBAC."""


class Overloaded(ApiError):
    """429 or 5xx: come back later, not before ``retry_after`` seconds."""


class Gone(ApiError):
    """410: a list token or resourceVersion is too old."""


class Unreachable(Exception):
    """No answer at all: refused, reset, timed out, TLS."""


def from_response(
    code: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> ApiError:
    """The exception for an answer; ``body`` is the Status object, or {} where there is none."""
    reason = str(body.get("reason") or "")
    message = str(body.get("message") or "")
    details = body.get("details") or {}
    retry_after = _seconds((headers or {}).get("Retry-After") or details.get("retryAfterSeconds"))
    kind: type[ApiError]
    if code == 404:
        kind = NotFound
    elif code == 409:
        kind = _conflict(reason, message, details)
    elif code in (400, 413, 415, 422):
        kind = Invalid
    elif code in (401, 403):
        kind = Forbidden
    elif code == 410:
        kind = Gone
    elif code == 429 or code >= 500:
        kind = Overloaded
    else:
        kind = ApiError
    return kind(code, reason, message, retry_after)


def _conflict(reason: str, message: str, details: Mapping[str, Any]) -> type[ApiError]:
    if reason == "AlreadyExists":
        return AlreadyExists
    causes = details.get("causes") or ()
    if any(cause.get("reason") == "FieldManagerConflict" for cause in causes):
        return FieldConflict
    if message.startswith("Apply failed with"):
        return FieldConflict
    return Stale


def _seconds(value: object) -> float:
    try:
        return max(0.0, float(str(value)))
    except ValueError:
        return 0.0
