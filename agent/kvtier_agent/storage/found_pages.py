"""Pages that an earlier process left on NVMe, offered to the cache."""

from __future__ import annotations

import structlog

from kvtier_agent.cache.cache import Cache
from kvtier_agent.storage import recovery
from kvtier_agent.storage.nvme import NvmeTier

log = structlog.get_logger("kvtier.storage.found")


def take_in(nvme: NvmeTier, cache: Cache, domain: str) -> bool:
    """Offer the cache what was found on the volumes, once; what it does not take is removed. Was
    anything taken? Before any page moves: see `Shaping.reconfigure`."""
    found = nvme.take_found()
    if found is None or nvme.l2 is None:
        return False
    taken = cache.adopt(
        found.keys, found.parents, found.depths, found.checksums, found.slots, found.tenants
    )
    recovery.keep_only(nvme.l2, found.slots[taken])
    if not taken.size:
        return False
    kept, room = int(taken.sum()), cache.shelves.pool2.available
    # A tier that got smaller keeps what fits. Anything else that is dropped is a promise broken.
    say = log.info if kept == len(taken) or not room else log.warning
    say(
        "pages of the agent before on NVMe", domain=domain, kept=kept,
        dropped=len(taken) - kept, room_left_pages=room,
    )  # fmt: skip
    return kept > 0
