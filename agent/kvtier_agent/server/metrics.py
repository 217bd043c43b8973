"""Prometheus metrics, made at scrape time from the latest snapshots: nothing on the request path.

Names and labels are a contract (alerts and dashboards use them):

``kv_cache_hit_total{layer}``, ``kv_cache_hit_tokens_total{layer}``
    pages and tokens asked for, by what became of them: layer 0, 1, 2 = hit there, ``miss`` =
    computed again. A page asked for is counted exactly once (``server.accounting``), so the sum
    over ``layer`` is what was asked, and the L0 hit rate is layer 0 over that sum.
``kv_offload_latency_seconds{src_layer,dst_layer}``
    a batch of pages moved between tiers, from the decision to the landed bytes.
``kv_page_table_size_bytes``
    the page tables of all trust domains.
``kv_evictions_total{layer}``
    pages lost from the cache while in that layer.

All others carry a ``domain`` label where a trust domain has its own figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from kvtier_agent.server.holding_metrics import held_by_clients
from kvtier_agent.server.latency import BOUNDS, Latency
from kvtier_agent.server.snapshot import DomainSnapshot, ServerSnapshot
from kvtier_agent.server.tenant_metrics import tenants
from kvtier_agent.storage.core import ENGINES
from kvtier_agent.supervise import Supervisor

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_COUNTERS = (
    ("kv_quarantined_pages", "Pages whose bytes did not match their checksum", "quarantined_pages"),
    ("kv_taken_over_pages", "DRAM pages of the agent before that were taken over at the start",
     "taken_over_pages"),
    ("kv_dropped_at_start_pages", "Pages in memory of the agent before that were not taken over",
     "dropped_at_start_pages"),
    ("kv_found_pages", "NVMe pages of the agent before that were indexed again", "found_pages"),
    ("kv_dropped_found_pages", "NVMe pages of the agent before that were not kept: no room",
     "dropped_found_pages"),
    ("kv_scrubbed_pages", "Pages taken over that the scrub has read", "scrubbed_pages"),
    ("kv_scrub_bad_pages", "Of those, pages that did not match their checksum", "scrub_bad_pages"),
    ("kv_unwritten_pages", "Pages in the journal that a power cut kept from reaching NVMe",
     "unwritten_pages"),
    ("kv_quarantined_slots", "NVMe slots that held a bad or unreadable page", "quarantined_slots"),
    ("kv_suspected_segments", "Times a segment of NVMe was found to hold bad pages",
     "suspected_segments"),
    ("kv_nvme_written_bytes", "Payload bytes written to NVMe", "stored_bytes_l2"),
    ("kv_nvme_compaction_written_bytes", "Of these, moved out of segments that were emptied",
     "compacted_bytes"),
    ("kv_pressure_tightened", "Times that L0 rose above pressure.tightenPercent", "tightened"),
    ("kv_pressure_demoted", "Times that L0 rose above pressure.demotePercent", "demote_all"),
    ("kv_emergency_evictions", "DRAM pages dropped because NVMe could not keep up",
     "emergency_evicted"),
    ("kv_early_units", "Transfer units told to layered loads before their page was complete",
     "early_units"),
    ("kv_late_pages", "Pages that landed after the deadline of their load", "late_pages"),
    ("kv_failed_moves", "Pages whose copy between tiers failed", "failed_moves"),
    ("kv_expired_leases", "Leases taken back because nobody released them", "expired_leases"),
    ("kv_expired_reservations", "Half-written puts taken back", "expired_reservations"),
    ("kv_clients_gone", "Clients that ended, in good order or not", "clients_gone"),
)  # fmt: skip
_TROUBLES = ("VolumeFull", "VolumeReadOnly", "VolumeUnusable")
_FAULTS = dict.fromkeys(
    ((o, f) for o in ("read", "write") for f in ("EIO", "ENOSPC", "short", "checksum", "slow")), 0
)
"""Shown from the start, so that the first one is a rise."""
_REFUSALS = ("value", "space", "busy", "closed", "quota")


class AgentCollector:
    """Reads the server's snapshot and the supervisor; a ``prometheus_client`` collector."""

    def __init__(
        self, snapshot: Callable[[], ServerSnapshot | None], supervisor: Supervisor
    ) -> None:
        self._snapshot = snapshot
        self._supervisor = supervisor

    def collect(self) -> Iterable[Metric]:
        """All families, in a fixed order."""
        yield from self._loops()
        snapshot = self._snapshot()
        if snapshot is None:
            return
        domains = list(snapshot.domains.values())
        yield from self._contract(domains)
        yield from self._tiers(domains)
        yield from self._counters(domains)
        yield from self._volumes(domains)
        yield from self._journals(domains)
        yield from self._lost_memory(domains)
        yield from self._gauges(domains)
        yield from held_by_clients(domains)
        yield from tenants(domains)
        posted = GaugeMetricFamily("kv_posted_calls", "Calls that wait for the cache thread")
        posted.add_metric([], snapshot.posted_calls)
        yield posted

    def _loops(self) -> Iterable[Metric]:
        restarts = CounterMetricFamily(
            "kv_loop_restarts", "Times a background loop died and was started again",
            labels=["loop"],
        )  # fmt: skip
        healthy = GaugeMetricFamily(
            "kv_loop_healthy", "1: the loop runs and beats", labels=["loop"]
        )
        for loop in self._supervisor.health():
            restarts.add_metric([loop.name], loop.restarts)
            healthy.add_metric([loop.name], 1 if loop.ok else 0)
        yield restarts
        yield healthy

    def _contract(self, domains: list[DomainSnapshot]) -> Iterable[Metric]:
        def total(name: str) -> int:
            return sum(domain.counters.get(name, 0) for domain in domains)

        for name, what, hits, misses in (
            ("kv_cache_hit", "Pages", "hits", "misses"),
            ("kv_cache_hit_tokens", "Tokens", "hit_tokens", "miss_tokens"),
        ):
            family = CounterMetricFamily(
                name, f"{what} asked for, by the layer that had them", labels=["layer"]
            )
            for layer in range(3):
                family.add_metric([str(layer)], total(f"{hits}_l{layer}"))
            family.add_metric(["miss"], total(misses))
            yield family
        evictions = CounterMetricFamily(
            "kv_evictions", "Pages lost from the cache while in the layer", labels=["layer"]
        )
        for layer in range(3):
            evictions.add_metric([str(layer)], total(f"evicted_l{layer}"))
        yield evictions
        table = GaugeMetricFamily("kv_page_table_size_bytes", "Size of the page tables")
        table.add_metric([], sum(domain.cache.page_table_bytes for domain in domains))
        yield table
        yield self._latency(domains)

    def _latency(self, domains: list[DomainSnapshot]) -> Metric:
        family = HistogramMetricFamily(
            "kv_offload_latency_seconds", "Time of a batch of pages between two layers",
            labels=["src_layer", "dst_layer"],
        )  # fmt: skip
        pairs: dict[tuple[int, int], Latency] = {}
        for domain in domains:
            for pair, latency in domain.latency.items():
                into = pairs.setdefault(pair, Latency())
                into.count += latency.count
                into.total_seconds += latency.total_seconds
                into.buckets = [a + b for a, b in zip(into.buckets, latency.buckets, strict=True)]
        for (source, target), latency in sorted(pairs.items()):
            bounds = [*(str(bound) for bound in BOUNDS), "+Inf"]
            family.add_metric(
                [str(source), str(target)],
                buckets=list(zip(bounds, latency.buckets, strict=True)),
                sum_value=latency.total_seconds,
            )
        return family

    def _tiers(self, domains: list[DomainSnapshot]) -> Iterable[Metric]:
        for name, what, attribute in (
            ("kv_tier_capacity_bytes", "Capacity in force", "capacity_bytes"),
            ("kv_tier_used_bytes", "Bytes taken, copies on their way included", "used_bytes"),
            ("kv_tier_pages", "Pages resident", "pages"),
            ("kv_tier_pinned_pages", "Pages held by leases and pins", "pinned_pages"),
            ("kv_tier_moving_pages", "Pages on their way in or out", "moving_pages"),
        ):
            family = GaugeMetricFamily(name, what, labels=["domain", "layer"])
            for domain in domains:
                for layer, tier in enumerate(domain.cache.tiers):
                    family.add_metric([domain.name, str(layer)], getattr(tier, attribute))
            yield family

    def _counters(self, domains: list[DomainSnapshot]) -> Iterable[Metric]:
        for name, what, counter in _COUNTERS:
            family = CounterMetricFamily(name, what, labels=["domain"])
            for domain in domains:
                family.add_metric([domain.name], domain.counters.get(counter, 0))
            yield family
        stored = CounterMetricFamily(
            "kv_stored_pages", "Pages that entered the layer", labels=["domain", "layer"]
        )
        puts = CounterMetricFamily(
            "kv_refused_puts", "Pages that were not taken", labels=["domain", "reason"]
        )
        refused = CounterMetricFamily(
            "kv_messages_refused", "Messages answered with a refusal", labels=["domain", "code"]
        )
        for domain in domains:
            for layer in range(3):
                stored.add_metric(
                    [domain.name, str(layer)], domain.counters.get(f"stored_l{layer}", 0)
                )
            for reason in _REFUSALS:
                puts.add_metric([domain.name, reason], domain.counters.get(f"refused_{reason}", 0))
            for code, count in sorted(domain.refused_messages.items()):
                refused.add_metric([domain.name, code], count)
        yield stored
        yield puts
        yield refused
        for name, what, attribute in (
            ("kv_messages", "Messages received", "messages"),
            ("kv_replies_dropped", "Replies that could not be delivered", "dropped_replies"),
            ("kv_connections_ended", "Connections that ended", "ended_connections"),
            ("kv_handshakes_failed", "Peers whose handshake failed", "failed_handshakes"),
            ("kv_lifelines_refused", "Lifelines that no client proved to own", "refused_lifelines"),
        ):
            family = CounterMetricFamily(name, what, labels=["domain"])
            for domain in domains:
                family.add_metric([domain.name], getattr(domain, attribute))
            yield family

    def _volumes(self, domains: list[DomainSnapshot]) -> Iterable[Metric]:
        used = GaugeMetricFamily(
            "kv_volume_used_bytes", "Bytes of segments on the volume", labels=["domain", "volume"]
        )
        trouble = GaugeMetricFamily(
            "kv_volume_trouble", "1: the volume takes no writes, for this reason",
            labels=["domain", "volume", "reason"],
        )  # fmt: skip
        for domain in domains:
            for volume in domain.volumes:
                used.add_metric([domain.name, volume.name], volume.used_bytes)
                for reason in _TROUBLES:
                    trouble.add_metric(
                        [domain.name, volume.name, reason], int(volume.trouble == reason)
                    )
        yield used
        yield trouble
        faults = CounterMetricFamily(
            "kv_io_faults", "Faults of drives", labels=["domain", "operation", "fault"]
        )
        for domain in domains:
            for (operation, fault), count in sorted({**_FAULTS, **domain.io_faults}.items()):
                faults.add_metric([domain.name, operation, fault], count)
        yield faults
        engine = GaugeMetricFamily(
            "kv_nvme_engine", "How pages go to drives", labels=["domain", "engine"]
        )
        for domain in domains:
            for name in ENGINES:
                engine.add_metric([domain.name, name], int(domain.nvme_engine == name))
        yield engine

    def _journals(self, domains: list[DomainSnapshot]) -> Iterable[Metric]:
        used = GaugeMetricFamily(
            "kv_journal_bytes", "Bytes that the journals of NVMe take", labels=["domain"]
        )
        written = CounterMetricFamily(
            "kv_checkpoints", "Checkpoints of the journals that were written", labels=["domain"]
        )
        failed = CounterMetricFamily(
            "kv_failed_checkpoints", "Tries to write one that failed", labels=["domain"]
        )
        for domain in domains:
            used.add_metric([domain.name], domain.journal.used_bytes)
            written.add_metric([domain.name], domain.journal.checkpoints)
            failed.add_metric([domain.name], domain.journal.failed_checkpoints)
        yield from (used, written, failed)

    def _lost_memory(self, domains: list[DomainSnapshot]) -> Iterable[Metric]:
        lost = CounterMetricFamily(
            "kv_arena_lost_pages", "Pages of 4 KiB found gone because a client cut the arena short",
            labels=["domain", "layer"],
        )  # fmt: skip
        cut = GaugeMetricFamily(
            "kv_arena_cut_bytes", "Bytes by which a client cut the arena short",
            labels=["domain", "layer"],
        )  # fmt: skip
        for domain in domains:
            for arena in domain.lost_memory:
                lost.add_metric([domain.name, str(arena.layer)], arena.lost_pages)
                cut.add_metric([domain.name, str(arena.layer)], arena.cut_bytes)
        yield from (lost, cut)

    def _gauges(self, domains: list[DomainSnapshot]) -> Iterable[Metric]:
        gauges: tuple[tuple[str, str, Callable[[DomainSnapshot], Any]], ...] = (
            ("kv_clients", "Clients connected", lambda d: d.clients),
            ("kv_leases", "Leases held", lambda d: d.cache.leases),
            ("kv_reservations", "Half-written puts", lambda d: d.cache.reservations),
            ("kv_parked_loads", "Loads that wait for NVMe", lambda d: d.parked_loads),
            ("kv_write_queue_bytes", "Bytes on their way to NVMe",
             lambda d: d.cache.write_queue_bytes),
            ("kv_open_questions", "Lookups whose outcome is not settled yet",
             lambda d: d.open_questions),
            ("kv_nvme_suspect_segments", "Segments not written to until they were tested",
             lambda d: d.cache.suspected_segments),
            ("kv_nvme_dead_bytes", "Bytes of slots whose page is gone, until their segment goes",
             lambda d: d.cache.dead_bytes),
            ("kv_admitting", "1: new pages are taken", lambda d: int(d.cache.admitting)),
        )  # fmt: skip
        for name, what, read in gauges:
            family = GaugeMetricFamily(name, what, labels=["domain"])
            for domain in domains:
                family.add_metric([domain.name], read(domain))
            yield family


class Metrics:
    """A registry of its own (nothing global), with the agent's collector in it."""

    def __init__(
        self, snapshot: Callable[[], ServerSnapshot | None], supervisor: Supervisor
    ) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(AgentCollector(snapshot, supervisor))

    def text(self) -> bytes:
        """The exposition, format ``CONTENT_TYPE``."""
        return generate_latest(self.registry)
