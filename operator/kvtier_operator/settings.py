"""Every knob of the operator, with unit, default and bounds.

One class is the only source: ``kvtier operator --help`` is made from it, and the environment
variables of the chart are its field names in capitals behind ``KVTIER_OPERATOR_``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

__all__ = ["ENV_PREFIX", "OperatorSettings"]

ENV_PREFIX = "KVTIER_OPERATOR_"


def _knob(text: str, unit: str = "", **bounds: Any) -> Any:
    """A field's description (no full stop), what its number counts, and its bounds."""
    extra: dict[str, JsonValue] = {"unit": unit} if unit else {}
    if shown := bounds.pop("shown", None):
        extra["shown"] = shown
    return Field(description=text, json_schema_extra=extra, **bounds)


class OperatorSettings(BaseSettings):
    """Settings of one operator process; frozen once read."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid")

    kubeconfig: Annotated[
        Path | None,
        _knob("Kubeconfig file", shown="the Pod's service account"),
    ] = None
    namespace: Annotated[
        str,
        _knob(
            "The operator's own namespace: revisions (ControllerRevisions) live in it",
            pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
            max_length=63,
        ),
    ] = "kvtier-system"
    http: Annotated[
        str,
        _knob("HOST:PORT of /healthz, /readyz and /metrics; port 0 takes a free one"),
    ] = "0.0.0.0:8080"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        _knob("Least severe level that is logged (JSON lines on standard error)"),
    ] = "info"

    orphan_grace_seconds: Annotated[
        int,
        _knob(
            "How long a node keeps serving what it holds after no policy selects it any more; then"
            " its bytes are dropped and its KVTierNode is deleted",
            "seconds",
            ge=0,
            le=604_800,
        ),
    ] = 3600
    revision_history_limit: Annotated[
        int,
        _knob(
            "ControllerRevisions kept per policy; those in use are never removed",
            "revisions",
            ge=2,
            le=100,
        ),
    ] = 10
    write_concurrency: Annotated[
        int, _knob("Objects that are reconciled at the same time", "objects", ge=1, le=256)
    ] = 32
    reconciles_per_second: Annotated[
        float, _knob("Most reconciles per second, averaged", "reconciles/s", ge=1, le=10_000)
    ] = 500.0
    reconcile_burst: Annotated[
        int,
        _knob(
            "Reconciles that may start at once on top of that average",
            "reconciles",
            ge=1,
            le=100_000,
        ),
    ] = 1000
    retry_base_seconds: Annotated[
        float,
        _knob(
            "Delay before the first retry of a failed reconcile; doubles each time, with jitter",
            "seconds",
            gt=0,
            le=60,
        ),
    ] = 0.2
    retry_max_seconds: Annotated[
        float, _knob("Longest delay between two retries", "seconds", gt=0, le=3600)
    ] = 60.0
    status_delay_seconds: Annotated[
        float,
        _knob(
            "How long reports of nodes are gathered before a policy's status is computed again",
            "seconds",
            ge=0,
            le=60,
        ),
    ] = 0.5
    interval_settle_seconds: Annotated[
        float,
        _knob(
            "How long after the number of nodes changed a new report interval is written to all",
            "seconds",
            ge=0,
            le=600,
        ),
    ] = 2.0
    resync_seconds: Annotated[
        float,
        _knob(
            "After that time a policy is looked at again although nothing seems to have changed",
            "seconds",
            ge=10,
            le=86400,
        ),
    ] = 600.0

    request_timeout_seconds: Annotated[
        float, _knob("Deadline of one API request", "seconds", ge=1, le=300)
    ] = 10.0
    connect_timeout_seconds: Annotated[
        float, _knob("Deadline of a connection to the API server", "seconds", ge=1, le=60)
    ] = 10.0
    watch_timeout_seconds: Annotated[
        int, _knob("After that time the API server ends a watch", "seconds", ge=30, le=3600)
    ] = 300
    watch_inactivity_seconds: Annotated[
        float,
        _knob(
            "A watch without an event or bookmark for that long is opened anew; the API server"
            " sends a bookmark about every 60 s",
            "seconds",
            ge=5,
            le=600,
        ),
    ] = 70.0
    ready_watch_age_seconds: Annotated[
        float,
        _knob(
            "/readyz turns red when a watch has been silent for that long",
            "seconds",
            ge=10,
            le=3600,
        ),
    ] = 150.0
    live_watch_age_seconds: Annotated[
        float,
        _knob(
            "/healthz turns red, and the Pod is restarted, when a watch has been silent for that"
            " long",
            "seconds",
            ge=10,
            le=86400,
        ),
    ] = 600.0

    @field_validator("http")
    @classmethod
    def _host_and_port(cls, value: str) -> str:
        host, colon, port = value.rpartition(":")
        if not colon or not host or not port.isdigit() or int(port) > 65535:
            raise ValueError("write HOST:PORT, for example 0.0.0.0:8080")
        return value

    @property
    def http_address(self) -> tuple[str, int]:
        """(host, port) of the probes."""
        host, _, port = self.http.rpartition(":")
        return host.strip("[]"), int(port)
