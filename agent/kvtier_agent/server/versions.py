"""Whether a client of another release and this agent mean the same by what they say."""

from __future__ import annotations

from kvtier_agent.cache.geometry import GeometryError
from kvtier_agent.cache.identity import KEY_VERSION
from kvtier_agent.server import protocol as p
from kvtier_agent.server.occupancy import RefusedRequestError


def spoken_with(hello: p.Hello) -> int:
    """The protocol version to speak with this client. Raises ``RefusedRequestError`` where there is
    none, or where it would not mean the same by pages, keys or checksums."""
    version = p.common_version((p.OLDEST_PROTOCOL, p.PROTOCOL), (hello.oldest, hello.newest))
    if version is None:
        raise RefusedRequestError(
            p.Code.PROTOCOL_VERSION,
            f"this agent speaks protocol {p.OLDEST_PROTOCOL} to {p.PROTOCOL}, the client "
            f"{hello.oldest} to {hello.newest}; use a client of this agent's release or the "
            "one before",
        )
    for what, since, needed in (
        ("ranks of a tensor-parallel group", p.RANKS_SINCE, hello.geometry.tp > 1),
        ("pages of several transfer units", p.UNITS_SINCE, _units(hello.geometry) > 1),
    ):
        if needed and version < since:
            raise RefusedRequestError(
                p.Code.PROTOCOL_VERSION,
                f"{what} need protocol {since}, this client speaks {hello.oldest} to"
                f" {hello.newest}; update the engine",
            )
    for code, what, ours, theirs in (
        (p.Code.ARENA_LAYOUT, "arena layout", p.ARENA_LAYOUT, hello.arena_layout),
        (p.Code.KEY_VERSION, "page keys of version", KEY_VERSION, hello.key_version),
    ):
        if ours != theirs:
            raise RefusedRequestError(
                code, f"this agent has {what} {ours}, the client {theirs}; update the older one"
            )
    return version


def _units(geometry: p.GeometryInfo) -> int:
    """Transfer units of a page; 1 where the geometry makes no sense, which is refused later."""
    try:
        return geometry.geometry().units
    except GeometryError:
        return 1
