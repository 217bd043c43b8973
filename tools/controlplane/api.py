"""A small HTTP client for the API server: JSON in, JSON out, one connection.

The launcher asks it for readiness, the test fixtures clean up with it. Tests of what kvtier itself
sends use kvtier's own client or kubectl.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import ssl
import tempfile
import time
import urllib.parse
from pathlib import Path
from typing import Any

Object = dict[str, Any]
"""A decoded JSON object of the API."""


class ApiError(Exception):
    """An answer of 400 or above: the HTTP status and the message of the API server."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


class ApiClient:
    """Requests to the server of a kubeconfig, as the user of that kubeconfig.

    Reads the kubeconfigs that :class:`controlplane.ControlPlane` writes (JSON, one context).
    Not for use by several threads at once. ``timeout`` is in seconds, for one read or write of the
    connection and for a server that answers "too many requests", which is asked again until then.
    Connection trouble surfaces as OSError or http.client.HTTPException.
    """

    def __init__(self, kubeconfig: Path, *, timeout: float = 30.0) -> None:
        config = json.loads(kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        address = urllib.parse.urlsplit(cluster["server"])
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        context = ssl.create_default_context(cadata=authority)
        if "client-certificate-data" in user:
            with tempfile.NamedTemporaryFile(suffix=".pem") as pem:
                for part in ("client-certificate-data", "client-key-data"):
                    pem.write(base64.b64decode(user[part]))
                pem.flush()
                context.load_cert_chain(pem.name)
        self._patience = timeout
        self._headers = {"Accept": "application/json"}
        if "token" in user:
            self._headers["Authorization"] = f"Bearer {user['token']}"
        self._connection = http.client.HTTPSConnection(
            address.hostname or "", address.port, timeout=timeout, context=context
        )

    def close(self) -> None:
        self._connection.close()

    def request(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        *,
        content_type: str = "application/json",
        accept: str = "application/json",
    ) -> Object:
        """The decoded answer; raises :class:`ApiError` for a refusal.

        ``path`` starts with a slash and may have a query. An answer that is no JSON (``/readyz``)
        comes back as ``{"text": ...}``.
        """
        headers = self._headers | {"Accept": accept}
        payload = None if body is None else json.dumps(body).encode()
        if payload is not None:
            headers["Content-Type"] = content_type
        deadline = time.monotonic() + self._patience
        while True:
            status, raw = self._send(method, path, payload, headers)
            # "Not now": nothing has been done. So it answers while it reads its storage again.
            if status != 429 or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        decoded: Object = {"text": raw.decode(errors="replace")}
        with contextlib.suppress(ValueError):
            parsed = json.loads(raw)
            if isinstance(parsed, dict):
                decoded = parsed
        if status >= 400:
            raise ApiError(status, str(decoded.get("message") or decoded.get("text", "")))
        return decoded

    def _send(
        self, method: str, path: str, payload: bytes | None, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        # A server that has been restarted has closed a connection we have kept; we notice when we
        # use it. Asking twice is safe for everything but a create.
        kept = self._connection.sock is not None and method != "POST"
        try:
            return self._exchange(method, path, payload, headers)
        except (ConnectionError, ssl.SSLEOFError, http.client.RemoteDisconnected):
            if not kept:
                raise
            return self._exchange(method, path, payload, headers)

    def _exchange(
        self, method: str, path: str, payload: bytes | None, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        try:
            self._connection.request(method, path, payload, headers)
            answer = self._connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException):
            # The next request opens a new connection; this one is in an unknown state.
            self._connection.close()
            raise

    def get(self, path: str) -> Object:
        return self.request("GET", path)

    def find(self, path: str) -> Object | None:
        """Like :meth:`get`, but None where there is nothing."""
        try:
            return self.get(path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def apply(self, path: str, body: Object, *, manager: str = "controlplane") -> Object:
        """Server-side apply of ``body``, which takes over fields of other managers."""
        return self.request(
            "PATCH",
            f"{path}?fieldManager={manager}&force=true&fieldValidation=Strict",
            body,
            content_type="application/apply-patch+yaml",
        )
