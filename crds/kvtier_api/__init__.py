"""API types of kvtier: the frozen models of ``KVTierPolicy`` and ``KVTierNode``, their rules, the
generator of their CRDs and the revision hash. Everything else is built on these and they know
nobody."""

from kvtier_api.conditions import Condition
from kvtier_api.meta import API_VERSION, GROUP, VERSION, ObjectMeta
from kvtier_api.node import Counters, KVTierNode, NodeSpec, NodeStatus, RevisionRef, TierStatus
from kvtier_api.policy import KVTierPolicy, PolicySpec, PolicyStatus, RevisionSpec
from kvtier_api.quantity import Quantity
from kvtier_api.reasons import Reason
from kvtier_api.revision import revision_hash, revision_name
from kvtier_api.validate import InvalidObject, Problem, validate

__all__ = [
    "API_VERSION",
    "GROUP",
    "VERSION",
    "Condition",
    "Counters",
    "InvalidObject",
    "KVTierNode",
    "KVTierPolicy",
    "NodeSpec",
    "NodeStatus",
    "ObjectMeta",
    "PolicySpec",
    "PolicyStatus",
    "Problem",
    "Quantity",
    "Reason",
    "RevisionRef",
    "RevisionSpec",
    "TierStatus",
    "revision_hash",
    "revision_name",
    "validate",
]
