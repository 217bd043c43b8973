"""Credentials and one connection pool, from a kubeconfig or from the Pod's service account.

The `kubernetes` package brings the kubeconfig formats, exec plugins and TLS; nothing of its
generated models is used. kopf gets its session from the same place (`runtime.tap`), so that there
is one login and a token that is renewed on disk is renewed for both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kubernetes.aio import client as kubernetes_client
from kubernetes.aio import config as kubernetes_config

__all__ = ["AUTH", "ConfigurationError", "connect"]

AUTH: Final = ["BearerToken"]
"""What the package calls the one way of its generated API to authenticate."""

TOKEN_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
TOKEN_REREAD_SECONDS: Final = 60.0
"""A projected token is replaced on disk long before it expires."""


class ConfigurationError(Exception):
    """Address or credentials cannot be had; the message says what to give."""


async def connect(kubeconfig: Path | None) -> kubernetes_client.ApiClient:
    """An ApiClient that has made no request yet. Raises `ConfigurationError`."""
    configuration = kubernetes_client.Configuration()
    configuration.retries = None  # the work queue backs off, once, with jitter
    configuration.connection_pool_maxsize = 0  # bounded by the workers instead
    try:
        if kubeconfig is not None:
            kubeconfig.open().close()  # the package takes a missing file for an empty one
            await kubernetes_config.load_kube_config(
                config_file=str(kubeconfig), client_configuration=configuration
            )
        else:
            kubernetes_config.load_incluster_config(
                client_configuration=configuration, try_refresh_token=False
            )
            configuration.refresh_api_key_hook = _token_reader(TOKEN_FILE, time.monotonic)
    except Exception as e:  # a file of the user's; the package lets through what its parsers raise
        where = f"the kubeconfig {kubeconfig}" if kubeconfig else "the Pod's service account"
        hint = "" if kubeconfig else "; outside a Pod give --kubeconfig FILE"
        said = (isinstance(e, OSError) and e.strerror) or " ".join(str(e).split()).rstrip(".")
        raise ConfigurationError(f"cannot use {where}: {said}{hint}") from e
    client = kubernetes_client.ApiClient(configuration)
    client.user_agent = "kvtier-operator"
    return client


def _token_reader(path: Path, clock: Callable[[], float]) -> Callable[[Any], None]:
    """A hook that rereads the token file once a minute of a clock that nobody sets back."""
    next_read = clock() + TOKEN_REREAD_SECONDS

    def reread(configuration: Any) -> None:
        nonlocal next_read
        now = clock()
        if now < next_read:
            return
        next_read = now + TOKEN_REREAD_SECONDS
        token = path.read_text().strip()
        if token:
            configuration.api_key["BearerToken"] = f"Bearer {token}"

    return reread
