"""Trust domains: what one domain's clients hold, another's can neither open nor ask for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvtier_agent.server.client import Client

ATTACK = """
import os, socket, sys
uid, gid = int(sys.argv[1]), int(sys.argv[1])
os.setgroups([]); os.setgid(gid); os.setuid(uid)
for path in sys.argv[2:]:
    try:
        if path.endswith((".sock", ".life")):
            one = socket.socket(socket.AF_UNIX); one.connect(path)
        else:
            os.close(os.open(path, os.O_RDWR if not path.endswith(".pages") else os.O_RDONLY))
        print("open", path)
    except PermissionError:
        print("denied", path)
"""


def as_user(uid: int, paths: list[Path]) -> list[str]:
    """What an ordinary user in the group of the same number can open: "open" or "denied" each."""
    done = subprocess.run(
        [sys.executable, "-c", ATTACK, str(uid), *map(str, paths)],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return [line.split()[0] for line in done.stdout.splitlines()]


def test_the_same_keys_in_two_domains_are_two_pages(
    make_agent: Callable[..., Any], connect: Callable[..., Client], pages_of: Callable[..., Any]
) -> None:
    agent = make_agent(domains={"red": None, "blue": None})
    red, blue = connect(agent.socket("red")), connect(agent.socket("blue"))
    pages, others = pages_of(1, 4), pages_of(2, 4)
    assert red.put(pages.keys, pages.bytes).stored == 4
    assert blue.lookup(pages.keys).prefix == 0
    assert blue.put(pages.keys, others.bytes).stored == 4
    out = np.zeros((4, red.page_bytes), np.uint8)
    for client, expected in ((red, pages.bytes), (blue, others.bytes)):
        with client.load(pages.keys) as lease:
            assert lease.copy_to(out).all()
        assert np.array_equal(out, expected)
    assert red.stats()["clients"] == 1


def test_a_secret_of_one_domain_opens_no_lifeline_of_another(
    make_agent: Callable[..., Any], connect: Callable[..., Client]
) -> None:
    import socket

    from kvtier_agent.server import protocol as p

    agent = make_agent(domains={"red": None, "blue": None})
    red = connect(agent.socket("red"))
    connection = red._link.connection
    assert connection is not None
    line = socket.socket(socket.AF_UNIX)
    line.settimeout(5)
    line.connect(str(agent.socket("blue").with_suffix(".life")))
    welcome = connection.welcome
    line.sendall(p.LIFELINE_HELLO.pack(p.LIFELINE_MAGIC, welcome.client, welcome.secret))
    assert line.recv(16) == b""
    line.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_a_user_of_one_domain_cannot_open_another_s_socket_arena_or_table(
    make_agent: Callable[..., Any], connect: Callable[..., Client]
) -> None:
    agent = make_agent(domains={"red": 4201, "blue": 4202})
    for name in ("red", "blue"):
        assert connect(agent.socket(name)).connected

    def places(name: str) -> list[Path]:
        layout = agent.cores[name].layout()
        arenas = [Path(arena.path) for arena in layout.arenas if arena.kind == "shm"]
        assert arenas
        socket = agent.socket(name)
        return [socket, socket.with_suffix(".life"), *arenas, Path(layout.table_path)]

    assert set(as_user(4201, places("red"))) == {"open"}
    assert set(as_user(4201, places("blue"))) == {"denied"}
    assert set(as_user(4202, places("red"))) == {"denied"}
