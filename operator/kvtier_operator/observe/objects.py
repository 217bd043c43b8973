"""Raw objects of the API server -> facts. Reading never raises, whatever stands in an object: what
the CRD of another version let through must not take the operator down.

A policy that the CRD let through but that breaks a rule (an older CRD, a newer operator) becomes a
`Policy` with ``problems``; its selector, priority and rollout are read on their own as far as they
can be, so that an invalid spec does not lose the policy its nodes. Where not even the spec can be
read, no selector is: not every node, but those that it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

from kvtier_api.conditions import find, parse_timestamp
from kvtier_api.model import ApiModel
from kvtier_api.node import NodeStatus, PolicyReference
from kvtier_api.policy import KVTierPolicy, NodeSelector, PolicyStatus, RevisionSpec
from kvtier_api.revision import revision_hash
from kvtier_api.validate import InvalidObject

from kvtier_operator.decide.facts import (
    FIELD_MANAGER,
    GENERATION_ANNOTATION,
    POLICY_LABEL,
    RECONCILE_ANNOTATION,
    AgentReport,
    CacheNode,
    ClusterNode,
    Policy,
    PolicyRef,
    StoredRevision,
)

__all__ = [
    "last_report_of",
    "read_cache_node",
    "read_node",
    "read_policy",
    "read_revision",
    "version_of",
]

MAX_PRIORITY: Final = 1_000_000

Raw = Mapping[str, Any]
M = TypeVar("M", bound=ApiModel)


def version_of(raw: Raw) -> int:
    """metadata.resourceVersion; comparable as a number within one kind."""
    text = str(raw.get("metadata", {}).get("resourceVersion") or "0")
    return int(text) if text.isdigit() else 0


def read_node(raw: Raw) -> ClusterNode:
    """A core Node."""
    meta = raw["metadata"]
    return ClusterNode(
        name=meta["name"],
        uid=meta.get("uid", ""),
        labels=dict(meta.get("labels") or {}),
        version=version_of(raw),
    )


def read_policy(raw: Raw) -> Policy:
    """A KVTierPolicy, its spec checked by the same rules as everywhere."""
    meta = raw["metadata"]
    spec = _section(raw, "spec")
    annotations = meta.get("annotations") or {}
    behaviour: Mapping[str, Any] | None = None
    revision = ""
    problems: tuple[str, ...] = ()
    selector: NodeSelector | None
    try:
        policy = KVTierPolicy.read({**raw, "status": None})
    except InvalidObject as e:
        problems = tuple(str(p) for p in e.problems)
        readable = isinstance(raw.get("spec"), Mapping)
        selector = _lenient(NodeSelector, spec.get("nodeSelector", {})) if readable else None
        priority = _whole(spec.get("priority"), 0, MAX_PRIORITY)
        rollout = spec.get("rollout")
        paused = isinstance(rollout, Mapping) and rollout.get("paused") is True
    else:
        selector = policy.spec.node_selector
        priority = policy.spec.priority
        paused = policy.spec.rollout.paused
        behaviour = policy.spec.behaviour().to_dict()
        revision = revision_hash(policy.spec)
    return Policy(
        name=meta["name"],
        uid=meta.get("uid", ""),
        generation=int(meta.get("generation") or 0),
        created=meta.get("creationTimestamp") or "",
        deleting=bool(meta.get("deletionTimestamp")),
        hands_off=annotations.get(RECONCILE_ANNOTATION) == "paused",
        selector=selector,
        priority=priority,
        paused=paused,
        behaviour=behaviour,
        revision=revision,
        problems=problems,
        status=_lenient(PolicyStatus, raw.get("status") or {}) or PolicyStatus(),
        version=version_of(raw),
    )


def read_cache_node(raw: Raw, before: tuple[Raw, CacheNode] | None = None) -> CacheNode:
    """A KVTierNode. ``before``: the last raw object and its facts; parts that are equal to it are
    taken over, since agents report often and the spec in full is large."""
    meta = raw["metadata"]
    spec = _section(raw, "spec")
    stable = spec.get("stable")
    if before is not None and _section(before[0], "spec").get("stable") == stable:
        stable_revision, stable_spec = before[1].stable_revision, before[1].stable_spec
    else:
        stable_revision, stable_spec = _stable(stable)
    return CacheNode(
        name=meta["name"],
        uid=meta.get("uid", ""),
        generation=int(meta.get("generation") or 0),
        deleting=bool(meta.get("deletionTimestamp")),
        node_uid=str(spec.get("nodeUID") or ""),
        policy=_reference(spec.get("policy")),
        stable_revision=stable_revision,
        stable_spec=stable_spec,
        orphaned_at=_moment(spec.get("orphanedAt")),
        report_interval=_whole(spec.get("reportIntervalSeconds"), 0, 3600),
        orphan_grace=_whole(spec.get("orphanGraceSeconds", -1), -1, 2**31),
        shared=_is_shared(meta),
        report=_report(_section(raw, "status")),
        version=version_of(raw),
    )


def last_report_of(raw: Raw) -> str:
    """status.lastReportTime as text, or "" before the first report."""
    return str(_section(raw, "status").get("lastReportTime") or "")


def read_revision(raw: Raw) -> StoredRevision:
    """A ControllerRevision of ours; its hash is computed from its content, never believed."""
    meta = raw["metadata"]
    labels, annotations = meta.get("labels") or {}, meta.get("annotations") or {}
    owners = [o for o in meta.get("ownerReferences") or () if o.get("kind") == "KVTierPolicy"]
    data = _section(raw, "data")
    spec = _lenient(RevisionSpec, data)
    return StoredRevision(
        name=meta["name"],
        uid=meta.get("uid", ""),
        policy=labels.get(POLICY_LABEL, ""),
        owner_uid=owners[0].get("uid", "") if owners else "",
        number=int(raw.get("revision") or 0),
        revision=revision_hash(spec) if spec is not None else "",
        generation=_whole(_int_or_none(annotations.get(GENERATION_ANNOTATION)), 0, 2**63 - 1),
        behaviour=spec.to_dict() if spec is not None else {},
    )


def _section(raw: Raw, name: str) -> Raw:
    value = raw.get(name)
    return value if isinstance(value, Mapping) else {}


def _stable(stable: object) -> tuple[str, Mapping[str, Any] | None]:
    if not isinstance(stable, Mapping):
        return "", None
    spec = _lenient(RevisionSpec, stable.get("spec") or {})
    if spec is None or revision_hash(spec) != stable.get("revision"):
        return "", _section(stable, "spec")
    return str(stable["revision"]), spec.to_dict()


def _reference(policy: object) -> PolicyRef | None:
    found = _lenient(PolicyReference, policy)
    return None if found is None else PolicyRef(found.name, found.uid, found.generation)


def _is_shared(meta: Raw) -> bool:
    """Whether anybody but the operator's apply owns fields of the spec, the operator's own
    `apply.client.Client.replace` included."""
    return any(
        (entry.get("manager"), entry.get("operation")) != (FIELD_MANAGER, "Apply")
        and not entry.get("subresource")
        and "f:spec" in (entry.get("fieldsV1") or {})
        for entry in meta.get("managedFields") or ()
    )


def _report(status: Raw) -> AgentReport:
    parsed = _lenient(NodeStatus, {k: status.get(k) for k in _REPORT_FIELDS})
    if parsed is None:
        return AgentReport()
    return AgentReport(
        observed_generation=parsed.observed_generation,
        revision=parsed.revision,
        not_applied=tuple(sorted(parsed.not_applied)),
        ready=find(parsed.conditions, "Ready"),
        stalled=find(parsed.conditions, "Stalled"),
    )


_REPORT_FIELDS: Final = ("observedGeneration", "revision", "notApplied", "conditions")


def _lenient(kind: type[M], raw: object) -> M | None:
    try:
        return kind.read(raw)
    except InvalidObject:
        return None


def _int_or_none(text: object) -> int | None:
    return int(text) if isinstance(text, str) and text.isdigit() else None


def _whole(value: object, low: int, high: int) -> int:
    return value if isinstance(value, int) and low <= value <= high else low


def _moment(text: object) -> float | None:
    try:
        return parse_timestamp(str(text)) if text else None
    except (ValueError, OverflowError):
        return None
