"""``metadata`` of policies that an API server takes and refuses, for tests offline and at one."""

from __future__ import annotations

from typing import Any, Final

Metadata = dict[str, Any]
_OWNER: Final = {"apiVersion": "v1", "kind": "ConfigMap", "name": "a", "uid": "u"}
_HALF: Final = "x" * (128 << 10)

#: Name of the case -> the metadata beside the name, and the path of the problem.
REFUSED: Final[dict[str, tuple[Metadata, str]]] = {
    "label key": ({"labels": {"bad key!": "x"}}, "metadata.labels.bad key!"),
    "label key in capitals": ({"labels": {"A.example/b": "x"}}, "metadata.labels.A.example/b"),
    "label key of two dots": ({"labels": {"a..b/c": "x"}}, "metadata.labels.a..b/c"),
    "label key of two slashes": ({"labels": {"a/b/c": "x"}}, "metadata.labels.a/b/c"),
    "label key without a name": ({"labels": {"a/": "x"}}, "metadata.labels.a/"),
    "label key of 64": ({"labels": {"k" * 64: "x"}}, f"metadata.labels.{'k' * 64}"),
    "label value of 64": ({"labels": {"a": "x" * 64}}, "metadata.labels.a"),
    "label value with a space": ({"labels": {"a": "b c"}}, "metadata.labels.a"),
    "label value that ends with a dash": ({"labels": {"a": "b-"}}, "metadata.labels.a"),
    "label value that is a number": ({"labels": {"a": 1}}, "metadata.labels.a"),
    "annotation key": ({"annotations": {"a b": "x"}}, "metadata.annotations.a b"),
    "annotations too large": ({"annotations": {"a": _HALF, "b": _HALF}}, "metadata.annotations"),
    "annotation that is a number": ({"annotations": {"a": 1}}, "metadata.annotations.a"),
    "finalizer": ({"finalizers": ["foo bar"]}, "metadata.finalizers[0]"),
    "finalizer that is a number": ({"finalizers": [1]}, "metadata.finalizers[0]"),
    "finalizers as text": ({"finalizers": "a/b"}, "metadata.finalizers"),
    "finalizers against each other": (
        {"finalizers": ["orphan", "foregroundDeletion"]},
        "metadata.finalizers",
    ),
    "no time": ({"creationTimestamp": "yesterday"}, "metadata.creationTimestamp"),
    "a date": ({"creationTimestamp": "2026-11-30"}, "metadata.creationTimestamp"),
    "no such day": ({"creationTimestamp": "2026-02-30T10:00:00Z"}, "metadata.creationTimestamp"),
    "time without a zone": (
        {"creationTimestamp": "2026-02-03T10:00:00"},
        "metadata.creationTimestamp",
    ),
    "generation as text": ({"generation": "1"}, "metadata.generation"),
    "uid as a number": ({"uid": 12}, "metadata.uid"),
    "owner without a uid": (
        {"ownerReferences": [{**_OWNER, "uid": ""}]},
        "metadata.ownerReferences[0].uid",
    ),
    "two controllers": (
        {
            "ownerReferences": [
                {**_OWNER, "controller": True},
                {**_OWNER, "uid": "v", "controller": True},
            ]
        },
        "metadata.ownerReferences",
    ),
    "unknown field": ({"lables": {"a": "b"}}, "metadata.lables"),
    "unknown field of an owner": (
        {"ownerReferences": [{**_OWNER, "nmae": "b"}]},
        "metadata.ownerReferences[0].nmae",
    ),
}

ACCEPTED: Final[dict[str, Metadata]] = {
    "nothing more": {},
    "labels": {"labels": {"example.com/a_B.c": "x" * 63, "b": "", "c": "A_b.c-1"}},
    "annotation keys in capitals": {"annotations": {"A.example/b": "any text: é"}},
    "annotations just small enough": {"annotations": {"a": _HALF, "b": _HALF[:-2]}},
    "finalizers": {"finalizers": ["example.com/archive", "orphan"]},
    "times": {"creationTimestamp": "2026-11-30T10:00:00Z"},
    "times with fraction and zone": {"creationTimestamp": "2026-11-30T10:00:00.25+02:00"},
    "nulls": {"creationTimestamp": None, "labels": None, "annotations": None, "finalizers": None},
    "an owner": {"ownerReferences": [{**_OWNER, "controller": True}]},
    "a generation": {"generation": 3},
}
