"""Spans leave the agent when an endpoint is configured, and cost nothing when none is."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from kvtier_agent.server.client import Client
from kvtier_agent.server.tracing import Tracing


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """What an OpenTelemetry collector on this machine receives."""
    received: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    yield received
    server.shutdown()
    server.server_close()


def test_requests_are_spans_with_domain_and_client(
    collector: list[bytes],
    make_agent: Callable[..., Any],
    connect: Callable[..., Client],
    pages_of: Callable[..., Any],
) -> None:
    agent = make_agent()
    client, pages = connect(agent.socket(), name="engine-7"), pages_of(1, 2)
    client.put(pages.keys, pages.bytes)
    client.lookup(pages.keys)
    client.close()
    agent.supervisor.stop()
    agent.loop.close()
    sent = b"".join(collector)
    for word in (b"kvtier-agent", b"Reserve", b"Commit", b"Lookup", b"engine-7", b"default"):
        assert word in sent


def test_without_an_endpoint_there_are_no_spans() -> None:
    tracing = Tracing({})
    assert not tracing.enabled
    with tracing.span("Lookup", {"a": 1}) as span:
        assert span is None
    tracing.close()


def test_the_endpoint_for_traces_alone_is_enough() -> None:
    tracing = Tracing({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9/v1/traces"})
    assert tracing.enabled
    assert "opentelemetry.sdk.trace" in sys.modules
