"""Calls of a ``Client`` that keep pages in memory, or delete them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.server import protocol as p
from kvtier_agent.server.answers import Deleted, Pinned
from kvtier_agent.server.arguments import as_keys
from kvtier_agent.server.link import Link

AT_ONCE: Final = 4096
"""Keys of one call: they cost the agent some milliseconds, in which others wait."""


class Keeping:
    """A part of ``Client``."""

    geometry: Geometry
    timeout_seconds: float
    _link: Link

    def pin(self, keys: Any) -> NDArray[np.uint8]:
        """Keep these pages in memory, HBM or DRAM, until ``unpin``: a ``Pinned`` code for each.

        What lies on NVMe only is read up. Pins end with this client, and with its agent: after a
        restart (``counters.losses`` tells) they are to be made anew. Pinning again is no second
        pin; it says which pages are still pinned, since a policy that makes a tier smaller may cost
        pins. ``NO_AGENT``: not known; the agent may have done it.
        """
        return self._ask(keys, p.Pin, p.Pinned, 1)

    def unpin(self, keys: Any) -> None:
        """End pins of this client; keys that it has not pinned are passed over."""
        names = as_keys(keys)
        connection = self._link.here()
        if connection is None or connection.welcome.protocol < p.PINS_SINCE:
            return
        most = min(connection.welcome.max_keys, AT_ONCE)
        for start in range(0, len(names), most):
            message = p.Unpin(0, connection.welcome.boot)
            self._link.post(connection, message, names[start : start + most].tobytes())

    def delete(self, keys: Any) -> NDArray[np.uint8]:
        """No lookup finds these pages from now on: a ``Deleted`` code for each.

        Any client of the trust domain may delete any page. Whoever reads one just then reads on;
        its bytes go when nobody holds it any more. It frees room and is no erasure: what lies on
        NVMe lies there until it is written over, and a power cut may bring a page back.
        """
        return self._ask(keys, p.Delete, p.Deleted, self.geometry.tp)

    def _ask(
        self, keys: Any, request: Callable[[int, int], p.Request], kind: type[p.Reply], parts: int
    ) -> NDArray[np.uint8]:
        """The first column of the answers, for as many calls as it takes. `parts`: that one key
        stands for."""
        names = as_keys(keys)
        status = np.full(len(names), Pinned.NO_AGENT, np.uint8)
        start, going = 0, True
        while going and start < len(names):
            going = False
            with self._link.asking(self.timeout_seconds) as (connection, left):
                if connection is None:
                    break
                welcome = connection.welcome
                if welcome.protocol < p.PINS_SINCE:
                    status[start:] = Pinned.UNSUPPORTED
                    break
                most = max(1, min(welcome.max_keys, AT_ONCE) // parts)
                part = names[start : start + most]
                connection.holds_pins |= kind is p.Pinned
                _, columns = connection.request(
                    request(connection.next_id(), welcome.boot), (part.data,), left, kind
                )
                status[start : start + len(part)] = p.column(columns[0], "u1", len(part))
                start, going = start + len(part), True
        return status


__all__ = ["Deleted", "Keeping", "Pinned"]
