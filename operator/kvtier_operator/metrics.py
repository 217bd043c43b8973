"""The operator's metrics; names start with ``kvtier_operator_``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Own registry: nothing of the process leaks in, and tests can have several."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.writes = Counter(
            "kvtier_operator_writes",
            "Writes to the API server, by resource, verb and outcome.",
            ["resource", "verb", "outcome"],
            registry=self.registry,
        )
        self.reconciles = Counter(
            "kvtier_operator_reconciles",
            "Reconciles, by kind of key, deciding rule and outcome.",
            ["kind", "rule", "outcome"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "kvtier_operator_reconcile_seconds",
            "Duration of a reconcile in seconds, writes included.",
            ["kind"],
            buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10),
            registry=self.registry,
        )

    def watch(self, name: str, help_text: str, read: Callable[[], Mapping[str, float]]) -> None:
        """A gauge that is read when it is asked for, labelled by ``kind``."""
        self.registry.register(_Gauge(name, help_text, read))

    def wrote(self, resource: str, verb: str, outcome: str) -> None:
        """Count one write."""
        self.writes.labels(resource, verb, outcome).inc()

    def render(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self.registry)


class _Gauge(Collector):
    def __init__(self, name: str, help_text: str, read: Callable[[], Mapping[str, float]]) -> None:
        self._name, self._help, self._read = name, help_text, read

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(self._name, self._help, labels=["kind"])
        for kind, value in sorted(self._read().items()):
            family.add_metric([kind], value)
        yield family
