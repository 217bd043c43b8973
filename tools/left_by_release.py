"""What an agent of a release leaves to the next one, and what a client says: kept by `freeze`.

    volume.tar.xz    a volume's folder after a kill: segments, a checkpoint, a journal behind it
    memory.tar.xz    the page table and the arena of L1 after a kill
    pages.json       what can be had back from each, as key -> SHA-256 of the page (hex)
    session.json     a client's session, every frame in order: (whose, base64 of each frame)

Pages have 4096 bytes, those of the session are `session_page`. Inodes differ where the files are
unpacked: whoever does that writes the arena's into the table.
"""

from __future__ import annotations

import base64
import hashlib
import json
import lzma
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from agents_in_turn import GEOMETRY, KEYS, PAGE, Node, page, put, right, settle
from kvtier_agent.server import connection
from kvtier_agent.server.client import Client
from small_agent import SHM, SmallAgent, sweep

SIZES = {"maximum": 16, "max_pages": 64}
"""Of the agents, in pages."""
SESSION_KEYS = KEYS[100:104]


def session_page(i: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of page `i` of the session."""
    return ((i << 16) + np.arange(PAGE // 4, dtype="<u4")).view(np.uint8)


def keep(target: Path) -> None:
    """Write the four files into `target`, which is there."""
    pages = {"volume": _volume(target), "memory": _memory(target)}
    (target / "pages.json").write_text(json.dumps(pages, indent=1) + "\n")
    session = [
        [whose, [base64.b64encode(frame).decode() for frame in frames]] for whose, frames in _talk()
    ]
    (target / "session.json").write_text(json.dumps(session, indent=1) + "\n")


def _volume(target: Path) -> dict[str, str]:
    with _node() as node:
        core = node.start(l1=4, l2=200, **SIZES)
        put(core, range(12))
        node.stop()  # with a checkpoint
        core = node.start(l1=4, l2=200, **SIZES)
        put(core, range(12, 20))
        assert right(core, range(20)) == list(range(20))
        core.cache.delete(1.0, KEYS[2:3])
        settle(core)
        node.kill()
        files = sorted(node.folder.glob("data0/kvtier/d/*"))
        _pack(target / "volume.tar.xz", node.folder, files)
        for path in node.folder.glob("d.*"):
            path.unlink()
        core = node.start(l1=4, l2=200, **SIZES)
        assert core.register(1.0, GEOMETRY).accepted
        return _sums(right(core, range(20)))


def _memory(target: Path) -> dict[str, str]:
    with _node() as node:
        put(node.start(l1=10, **SIZES), range(8))
        node.kill()
        _pack(target / "memory.tar.xz", node.folder, [node.table, node.l1])
        return _sums(right(node.start(l1=10, **SIZES), range(8)))


def _sums(which: Iterable[int]) -> dict[str, str]:
    return {KEYS[i].tobytes().hex(): hashlib.sha256(page(i).tobytes()).hexdigest() for i in which}


@contextmanager
def _node() -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="kvtier-freeze-", dir=SHM) as folder:
        node = Node(Path(folder))
        yield node
        if node.core is not None:
            node.kill()


def _pack(archive: Path, root: Path, files: list[Path]) -> None:
    """The same bytes each time, whoever packs them."""

    def nobody(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return member

    with lzma.open(archive, "w", preset=9) as out, tarfile.open(fileobj=out, mode="w") as tar:
        for path in files:
            tar.add(path, path.relative_to(root), filter=nobody)


def _talk() -> list[tuple[str, list[bytes]]]:
    """Everything that a client asks for once, on pages of its own."""
    said: list[tuple[str, list[bytes]]] = []
    send, receive = connection.send_frames, connection.receive_frames

    def sent(socket: Any, frames: Any) -> None:
        send(socket, frames)
        said.append(("client", [bytes(frame) for frame in frames]))

    def received(socket: Any, **options: Any) -> list[Any]:
        frames = receive(socket, **options)
        said.append(("agent", [bytes(frame) for frame in frames]))
        return frames

    with tempfile.TemporaryDirectory(prefix="kvt-") as folder:
        agent = SmallAgent(Path(folder), l0=0, l1=64 * PAGE, l2=0)
        try:
            with (
                mock.patch.object(connection, "send_frames", sent),
                mock.patch.object(connection, "receive_frames", received),
                Client(agent.socket(), GEOMETRY, timeout_seconds=10.0, name="kept") as client,
            ):
                assert client.wait_connected(10.0)
                keys = SESSION_KEYS
                assert client.lookup(keys).prefix == 0
                assert client.put(keys, np.stack([session_page(i) for i in range(4)])).stored == 4
                assert client.lookup(keys, total_tokens=64).prefix == 4
                out = np.zeros((4, PAGE), np.uint8)
                with client.load(keys) as lease:
                    assert lease.copy_to(out).all()
                client.pin(keys[:2])
                client.unpin(keys[:2])
                client.delete(keys[3:])
                assert client.lookup(keys).prefix == 3
                client.stats()
        finally:
            agent.close()
            sweep(Path(folder))
    return said
