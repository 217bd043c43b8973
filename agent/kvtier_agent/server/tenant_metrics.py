"""Metrics of tenants that have a quota: as many labels as a policy lists, and one for the rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvtier_agent.server.snapshot import DomainSnapshot

OTHERS = "(others)"
"""No tenant's name: those have no brackets."""


def tenants(domains: Sequence[DomainSnapshot]) -> Iterable[Metric]:
    """Nothing where no policy has quotas."""
    if not any(domain.cache.tenants for domain in domains):
        return
    used = GaugeMetricFamily(
        "kv_tenant_used_bytes", "Bytes that a tenant's pages take",
        labels=["domain", "tenant", "layer"],
    )  # fmt: skip
    quota = GaugeMetricFamily(
        "kv_tenant_quota_bytes", "Most bytes that a tenant's pages may take",
        labels=["domain", "tenant", "layer"],
    )  # fmt: skip
    refused = CounterMetricFamily(
        "kv_tenant_refused_pages", "Pages not taken because of a quota",
        labels=["domain", "tenant"],
    )  # fmt: skip
    evicted = CounterMetricFamily(
        "kv_tenant_evicted_pages", "Pages lost because of a quota", labels=["domain", "tenant"]
    )
    for domain in domains:
        listed = domain.cache.tenants
        if not listed:
            continue
        for layer, tier in enumerate(domain.cache.tiers):
            for tenant in listed:
                names = [domain.name, tenant.name, str(layer)]
                used.add_metric(names, tenant.used_bytes[layer])
                bound = tenant.quota_bytes[layer]
                if bound is not None:
                    quota.add_metric(names, bound)
            rest = tier.used_bytes - sum(tenant.used_bytes[layer] for tenant in listed)
            used.add_metric([domain.name, OTHERS, str(layer)], max(0, rest))
        for tenant in listed:
            refused.add_metric([domain.name, tenant.name], tenant.refused_pages)
            evicted.add_metric([domain.name, tenant.name], tenant.evicted_pages)
    yield from (used, quota, refused, evicted)
