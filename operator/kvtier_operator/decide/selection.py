"""Which policy rules which node.

A policy is a candidate for a node when its selector matches the node's labels. Among candidates
the higher priority rules, then the older policy (creationTimestamp), then the name that sorts
first; the others are superseded on that node. The order is total, so that the answer does not
depend on the order in which anything was seen.

A policy that is being deleted selects nothing. A policy whose selector cannot be read keeps the
nodes whose KVTierNode names it.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvtier_api.policy import NodeSelector

from kvtier_operator.decide.facts import CacheNode, ClusterNode, Policy

__all__ = ["candidates", "describe", "precedence", "selects"]


def precedence(policy: Policy) -> tuple[int, str, str]:
    """Sort key: the policy that rules comes first."""
    return (-policy.priority, policy.created, policy.name)


def selects(policy: Policy, node: ClusterNode, cache: CacheNode | None) -> bool:
    """Whether ``policy`` selects ``node``, whoever rules it."""
    if policy.deleting:
        return False
    if policy.selector is None:
        return cache is not None and cache.policy is not None and cache.policy.uid == policy.uid
    return policy.selector.matches(dict(node.labels))


def candidates(
    node: ClusterNode | None, cache: CacheNode | None, policies: Iterable[Policy]
) -> tuple[str, ...]:
    """Names of the policies that select ``node``, the one that rules it first."""
    if node is None:
        return ()
    found = [p for p in policies if selects(p, node, cache)]
    found.sort(key=precedence)
    return tuple(p.name for p in found)


def describe(selector: NodeSelector | None) -> str:
    """A selector in the words of ``kubectl get -l``."""
    if selector is None:
        return "(not readable)"
    parts = [f"{key}={value}" for key, value in sorted(selector.match_labels.items())]
    for e in selector.match_expressions:
        values = f" ({', '.join(e.values)})"
        words = {
            "In": f"{e.key} in{values}",
            "NotIn": f"{e.key} notin{values}",
            "Exists": e.key,
            "DoesNotExist": f"!{e.key}",
        }
        parts.append(words[e.operator])
    return ",".join(parts) or "(every node)"
