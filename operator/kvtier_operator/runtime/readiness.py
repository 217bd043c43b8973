"""Before kopf starts: the API server answers, and knows the kinds.

kopf gives up after a minute when the API server is away, and only warns when a CRD is missing, to
never look again. Both are ordinary on the first day of a cluster, so they are waited for here, with
a line in the log that says what is missing.
"""

from __future__ import annotations

import asyncio
import json
from typing import Final

from kvtier_operator.apply.client import Client
from kvtier_operator.apply.errors import Unreachable
from kvtier_operator.logs import get_logger
from kvtier_operator.observe.store import CACHE_NODES, POLICIES

__all__ = ["wait_until_ready"]

log = get_logger("readiness")

DISCOVERY: Final = "/apis/kvtier.io/v1alpha1"
FIRST_SECONDS: Final = 0.2
MAX_SECONDS: Final = 5.0


async def wait_until_ready(client: Client) -> None:
    """Return when the API server is ready and serves both kinds. Logs each new obstacle once."""
    said = ""
    delay = FIRST_SECONDS
    while True:
        obstacle = await _obstacle(client)
        if not obstacle:
            return
        if obstacle != said:
            log.warning("waiting", obstacle=obstacle)
            said, delay = obstacle, FIRST_SECONDS
        await asyncio.sleep(delay)
        delay = min(MAX_SECONDS, 2 * delay)


async def _obstacle(client: Client) -> str:
    try:
        code, text = await client.get_raw("/readyz")
        if code in (401, 403):
            return f"the API server refuses these credentials (HTTP {code} for /readyz)"
        if code != 200:
            return f"the API server is not ready: HTTP {code}"
        code, text = await client.get_raw(DISCOVERY)
    except Unreachable as e:
        return f"the API server cannot be reached: {e}"
    if code == 404:
        return "the CRDs of kvtier.io/v1alpha1 are not installed: apply them (the chart does)"
    if code != 200:
        return f"the API server does not list kvtier.io/v1alpha1: HTTP {code}"
    served = {resource.get("name") for resource in json.loads(text).get("resources", ())}
    missing = sorted({POLICIES, CACHE_NODES} - served)
    return f"CRDs are missing: {', '.join(missing)}" if missing else ""
