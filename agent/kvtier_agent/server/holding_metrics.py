"""Metrics of what clients pin and delete."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvtier_agent.server.snapshot import DomainSnapshot

_COUNTERS = (
    ("kv_pins", "Pins that clients made", "pinned"),
    ("kv_refused_pins", "Pins refused, for room or for the client's limit", "refused_pins"),
    ("kv_lost_pins", "Pins that the agent ended: a tier shrank, or NVMe failed", "lost_pins"),
    ("kv_expired_pins", "Pins of clients that were silent for too long", "expired_pins"),
    ("kv_deleted_pages", "Pages that clients deleted", "deleted_pages"),
)


def held_by_clients(domains: Sequence[DomainSnapshot]) -> Iterable[Metric]:
    """Pins and deletions, by trust domain."""
    pages = GaugeMetricFamily(
        "kv_pinned_pages", "Pages that clients pinned", labels=["domain", "layer"]
    )
    size = GaugeMetricFamily(
        "kv_pinned_bytes", "Bytes of the slots of pinned pages", labels=["domain", "layer"]
    )
    for domain in domains:
        slot = domain.cache.geometry.get("slot_bytes", 0)
        for layer in ("0", "1"):
            kept = domain.cache.tiers[int(layer)].kept_pages
            pages.add_metric([domain.name, layer], kept)
            size.add_metric([domain.name, layer], kept * slot)
    yield pages
    yield size
    marked = GaugeMetricFamily(
        "kv_marked_pages", "Pages deleted or found bad whose bytes are not free yet",
        labels=["domain"],
    )  # fmt: skip
    for domain in domains:
        marked.add_metric([domain.name], domain.cache.marked_pages)
    yield marked
    for name, what, counter in _COUNTERS:
        family = CounterMetricFamily(name, what, labels=["domain"])
        for domain in domains:
            family.add_metric([domain.name], domain.counters.get(counter, 0))
        yield family
