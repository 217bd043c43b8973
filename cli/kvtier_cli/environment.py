"""Environment variables that look like settings and are none.

A misspelt option is refused by the command line; a misspelt variable would be passed over, and the
program would run with the default. So every variable with a program's prefix must be one of its
settings, except those that Kubernetes puts into every Pod for a Service whose name begins so.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from kvtier_api.shape import nearest

__all__ = ["strays"]

_OF_A_SERVICE: Final = re.compile(
    r"(?:.+_)?SERVICE_(?:HOST|PORT(?:_.+)?)|(?:.+_)?PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?"
)
"""``kvtier-agent`` gives ``KVTIER_AGENT_SERVICE_HOST``, ``.._PORT_9476_TCP_ADDR``, ..."""
_LINK: Final = re.compile(r"(?:tcp|udp|sctp)://")
"""The value of the one such variable whose name could be a setting: ``KVTIER_AGENT_PORT``."""


def strays(environment: Mapping[str, str], prefix: str, known: Collection[str]) -> Iterator[str]:
    """A sentence about each variable with ``prefix`` that is no setting in ``known`` (lower case).

    Like the settings themselves, names count without regard to case.
    """
    for variable in sorted(environment):
        if not variable.upper().startswith(prefix):
            continue
        name = variable[len(prefix) :].lower()
        if name in known or _is_of_a_service(name.upper(), environment[variable]):
            continue
        near = nearest(name, list(known))
        hint = f"did you mean {prefix}{near.upper()}?" if near else "remove it; --help lists all"
        yield f"{variable} in the environment is no setting: {hint}"


def _is_of_a_service(name: str, value: str) -> bool:
    if _OF_A_SERVICE.fullmatch(name):
        return True
    return name.endswith("PORT") and _LINK.match(value) is not None
