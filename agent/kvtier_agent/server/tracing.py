"""OpenTelemetry spans of requests, where an endpoint is configured; nothing at all otherwise.

``OTEL_EXPORTER_OTLP_ENDPOINT`` (or the ``_TRACES_`` form) switches it on; all else is configured
with OpenTelemetry's own variables. The packages are imported only then.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_NOTHING: AbstractContextManager[None] = nullcontext()


class Tracing:
    """Makes spans. ``enabled`` False: ``span`` costs one attribute test."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        """Reads the environment; a broken OpenTelemetry installation is an ImportError here."""
        self.enabled = any(environment.get(name) for name in _VARIABLES)
        self._tracer: Any = None
        self._provider: Any = None
        if self.enabled:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            resource = Resource.create({"service.name": "kvtier-agent"})
            self._provider = TracerProvider(resource=resource)
            self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
            self._tracer = self._provider.get_tracer("kvtier_agent.server")

    def span(self, name: str, attributes: Mapping[str, Any]) -> AbstractContextManager[Any]:
        """A span around one request, ended with the ``with`` block."""
        if not self.enabled:
            return _NOTHING
        span: AbstractContextManager[Any] = self._tracer.start_as_current_span(
            name, attributes=dict(attributes)
        )
        return span

    def close(self) -> None:
        """Send what is left."""
        if self._provider is not None:
            self._provider.shutdown()
