"""What an API server asks of ``metadata``, whatever the kind; said before it is asked.

The same checks as Kubernetes' ``apimachinery`` (``api/validation/objectmeta.go``) makes for an
object without a namespace: types of the fields, names, label and annotation keys, sizes, times.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Final

from kvtier_api.shape import nearest

__all__ = ["MAX_ANNOTATION_BYTES", "problems"]

MAX_ANNOTATION_BYTES: Final = 256 << 10
"""Keys and values of all annotations together."""

_TEXT: Final = "must be text: put it into quotes"
_LABEL: Final = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = re.compile(rf"{_LABEL}(\.{_LABEL})*", re.ASCII)
_PLAIN = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", re.ASCII)
_TIME = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}([.,]\d+)?(Z|[+-]\d{2}:\d{2})", re.ASCII)
_TEXTS: Final = ("generateName", "selfLink", "uid", "resourceVersion")
_NUMBERS: Final = ("generation", "deletionGracePeriodSeconds")
_TIMES: Final = ("creationTimestamp", "deletionTimestamp")
_FIELDS = frozenset(
    {"name", "namespace", "labels", "annotations", "ownerReferences", "finalizers"}
    | {"managedFields", *_TEXTS, *_NUMBERS, *_TIMES}
)
_OWNER_TEXTS: Final = ("apiVersion", "kind", "name", "uid")
_OWNER_FLAGS: Final = ("controller", "blockOwnerDeletion")
_INT64: Final = 1 << 63


def problems(metadata: object) -> Iterator[tuple[str, str]]:
    """Path (``metadata.labels.a``) and sentence of everything wrong with ``metadata``."""
    if not isinstance(metadata, Mapping):
        yield "metadata", "write metadata: {name: NAME}"
        return
    for key in metadata:
        if key not in _FIELDS:
            near = nearest(str(key), sorted(_FIELDS))
            yield f"metadata.{key}", f"unknown field{f', did you mean {near}?' if near else ''}"
    yield from _name(metadata)
    given = {key: value for key, value in metadata.items() if value is not None}
    for key in _TEXTS:
        if key in given and not isinstance(given[key], str):
            yield f"metadata.{key}", _TEXT
    for key in _NUMBERS:
        if key in given and not _is_whole(given[key]):
            yield f"metadata.{key}", "must be a whole number"
    for key in _TIMES:
        if key in given and not _is_time(given[key]):
            yield f"metadata.{key}", "must be a time such as 2026-11-30T12:00:00Z, or leave it out"
    yield from _labels(given.get("labels", {}))
    yield from _annotations(given.get("annotations", {}))
    yield from _finalizers(given.get("finalizers", []))
    yield from _owners(given.get("ownerReferences", []))
    if not isinstance(given.get("managedFields", []), list):
        yield "metadata.managedFields", "must be a list; leave it out, the API server writes it"


def _name(metadata: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    name = metadata.get("name")
    if not isinstance(name, str) or not name:
        yield "metadata.name", "write a name, such as llama-70b-chat"
    elif len(name) > 253 or not _SUBDOMAIN.fullmatch(name):
        yield (
            "metadata.name",
            "a name has lower-case letters, digits, - and . only, such as llama-70b-chat",
        )
    if metadata.get("namespace"):
        yield "metadata.namespace", "this kind has no namespace: leave it out"


def _labels(labels: object) -> Iterator[tuple[str, str]]:
    if not isinstance(labels, Mapping):
        return  # the model says so
    for key, value in labels.items():
        path = f"metadata.labels.{key}"
        if not _is_qualified(str(key)):
            yield (
                path,
                "not the key of a label: write NAME or DOMAIN/NAME, such as example.com/team",
            )
        elif isinstance(value, str) and value and not _PLAIN.fullmatch(value):
            yield (
                path,
                "not the value of a label: write at most 63 letters, digits, -, _ and ., with a "
                "letter or digit first and last",
            )


def _annotations(annotations: object) -> Iterator[tuple[str, str]]:
    if not isinstance(annotations, Mapping):
        return  # the model says so
    size = 0
    for key, value in annotations.items():
        size += sum(len(str(part).encode(errors="surrogatepass")) for part in (key, value))
        if not _is_qualified(str(key).lower()):
            yield (
                f"metadata.annotations.{key}",
                "not the key of an annotation: write NAME or DOMAIN/NAME, such as example.com/team",
            )
    if size > MAX_ANNOTATION_BYTES:
        yield (
            "metadata.annotations",
            f"{size} bytes in all: the API server takes {MAX_ANNOTATION_BYTES}",
        )


def _finalizers(finalizers: object) -> Iterator[tuple[str, str]]:
    if not isinstance(finalizers, list):
        yield "metadata.finalizers", "must be a list"
        return
    for index, name in enumerate(finalizers):
        path = f"metadata.finalizers[{index}]"
        if not isinstance(name, str):
            yield path, _TEXT
        elif not _is_qualified(name):
            yield path, "not a finalizer: write DOMAIN/NAME, such as example.com/archive"
    if {"orphan", "foregroundDeletion"} <= {f for f in finalizers if isinstance(f, str)}:
        yield "metadata.finalizers", "orphan and foregroundDeletion exclude each other: remove one"


def _owners(owners: object) -> Iterator[tuple[str, str]]:
    if not isinstance(owners, list):
        return  # the model says so
    for index, owner in enumerate(owners):
        if not isinstance(owner, Mapping):
            continue
        path = f"metadata.ownerReferences[{index}]"
        for key in owner:
            if key not in (*_OWNER_TEXTS, *_OWNER_FLAGS):
                yield f"{path}.{key}", "unknown field"
        for key in _OWNER_TEXTS:
            if owner.get(key) == "":
                yield f"{path}.{key}", "must not be empty"
    if sum(isinstance(o, Mapping) and o.get("controller") is True for o in owners) > 1:
        yield "metadata.ownerReferences", "only one owner can have controller: true"


def _is_qualified(key: str) -> bool:
    """A Kubernetes qualified name: ``NAME`` or ``DNS-SUBDOMAIN/NAME``."""
    domain, slash, name = key.rpartition("/")
    if slash and (len(domain) > 253 or not _SUBDOMAIN.fullmatch(domain)):
        return False
    return _PLAIN.fullmatch(name) is not None


def _is_whole(value: object) -> bool:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return whole and not isinstance(value, bool) and -_INT64 <= value < _INT64  # type: ignore[operator]


def _is_time(value: object) -> bool:
    if not isinstance(value, str) or not _TIME.fullmatch(value):
        return False
    try:
        datetime.fromisoformat(re.sub(r"[.,]\d+", "", value))
    except ValueError:
        return False
    return True
