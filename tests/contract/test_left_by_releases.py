"""An agent that is updated finds what an earlier release left, whole, or starts cold and says why;
a client of that release is served. Never is anything taken for what it is not.

`tools/left_by_release.py` wrote the files. What reads them here knows nothing of today's formats
but what the release itself said of them.
"""

from __future__ import annotations

import array
import base64
import hashlib
import json
import shutil
import socket
import struct
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import left_by_release
import msgspec
import numpy as np
import pytest
import xxhash
import zmq
from agents_in_turn import GEOMETRY, PAGE, Node, settle
from kvtier_agent.cache.results import MISS
from kvtier_agent.cache.snapshot import check_books
from kvtier_agent.server import protocol
from kvtier_agent.storage.core import Core
from small_agent import SmallAgent, sweep

RELEASES = sorted((Path(__file__).parent / "releases").iterdir())
SIZES = {"maximum": 16, "max_pages": 64}


@pytest.fixture(params=RELEASES, ids=lambda path: path.name)
def left(request: pytest.FixtureRequest) -> Path:
    return Path(request.param) / "state"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with Node(tmp_path) as made:
        yield made


def unpack(archive: Path, folder: Path) -> None:
    """With the modes that they had: an agent looks at them."""
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="fully_trusted")


def kept(left: Path, where: str) -> dict[bytes, str]:
    found: dict[str, str] = json.loads((left / "pages.json").read_text())[where]
    assert len(found) >= 8
    return {bytes.fromhex(key): digest for key, digest in found.items()}


def served(core: Core, keys: list[bytes]) -> dict[bytes, str]:
    """SHA-256 of the pages that come with the checksum that the agent says of them."""
    found = {}
    for key in keys:
        names = np.frombuffer(key, np.uint8)[None]
        ticket = core.cache.load(2.0, 2, names, 1e9)
        core.pump()
        done = [ticket, *core.collect(2.0)][-1]
        if done.tier[0] != MISS:
            start = int(done.offset[0])
            copy = core.l1.bytes[start : start + PAGE].tobytes()
            if xxhash.xxh3_64_intdigest(copy) == int(done.checksum[0]):
                found[key] = hashlib.sha256(copy).hexdigest()
        core.cache.release(2.0, 2, done.lease)
        settle(core)
    return found


def rename_arena(table: Path, inode: int) -> None:
    """The table says of which file its slots are; unpacked, that is another one. Releases to v0.1
    have a note at byte 512: its length and CRC-32, then JSON."""
    raw = bytearray(table.read_bytes())
    length, crc = struct.unpack_from("<II", raw, 512)
    assert zlib.crc32(raw[520 : 520 + length]) == crc
    note = json.loads(raw[520 : 520 + length])
    note["l1_inode"] = inode
    text = json.dumps(note, separators=(",", ":")).encode()
    raw[512 : 520 + len(text)] = struct.pack("<II", len(text), zlib.crc32(text)) + text
    with table.open("r+b") as file:
        file.write(raw)


def test_pages_of_a_volume_are_there_or_the_reason_is(
    left: Path, node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = kept(left, "volume")
    unpack(left / "volume.tar.xz", node.folder)
    core = node.start(l1=4, l2=200, **SIZES)
    assert core.register(1.0, GEOMETRY).accepted
    found = served(core, list(pages))
    assert found.items() <= pages.items(), "wrong bytes"
    if found != pages:
        assert not found, "some of them, that is neither"
        assert "this agent writes" in capsys.readouterr().out
    check_books(core.cache)


def test_pages_in_memory_are_there_or_the_reason_is(left: Path, node: Node) -> None:
    pages = kept(left, "memory")
    unpack(left / "memory.tar.xz", node.folder)
    rename_arena(node.table, node.l1.stat().st_ino)
    core = node.start(l1=10, **SIZES)
    found = served(core, list(pages))
    assert found.items() <= pages.items(), "wrong bytes"
    restart = core.memory.restart
    if found != pages:
        assert not found, "some of them, that is neither"
        assert restart.say().startswith("the dram tier started cold: ")
        assert "layout" in restart.cold
    else:
        assert restart.taken_over == len(pages)
    assert core.register(1.0, GEOMETRY).accepted
    check_books(core.cache)


@pytest.mark.parametrize("where", ["volume", "memory"])
def test_damage_in_what_was_left_is_a_miss(left: Path, node: Node, where: str) -> None:
    """The comparison above is not blind, and old files are checked as new ones are."""
    pages = kept(left, where)
    unpack(left / f"{where}.tar.xz", node.folder)
    if where == "memory":
        rename_arena(node.table, node.l1.stat().st_ino)
        damaged = [node.l1]
    else:
        damaged = list(node.folder.glob("data0/kvtier/d/segment-*"))
    for path in damaged:
        raw = np.fromfile(path, np.uint8)
        raw[100::1000] ^= 4
        with path.open("r+b") as file:
            file.write(raw)
    core = node.start(l1=10, l2=200 if where == "volume" else 0, **SIZES)
    assert core.register(1.0, GEOMETRY).accepted
    assert served(core, list(pages)) == {}


@pytest.fixture
def agent() -> Iterator[SmallAgent]:
    folder = Path(tempfile.mkdtemp(prefix="kvt-"))
    made = SmallAgent(folder, l0=0, l1=64 * PAGE, l2=0)
    yield made
    made.close()
    shutil.rmtree(folder, ignore_errors=True)
    sweep(folder)


class OldClient:
    """Says what a client of a release said, and takes the answers as that client would. Of what it
    is told it keeps what a client keeps: boot, number and secret of this agent, its lease."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(f"ipc://{path}")
        self.boot = self.lease = 0
        self.arena = np.zeros(0, np.uint8)
        self.line: socket.socket | None = None
        self.offered: list[int] = []

    def say(self, frames: list[bytes]) -> None:
        """`boot` is the second number of what has one, `lease` the third of a release."""
        header = msgspec.msgpack.decode(frames[0])
        if header[0] in ("cm", "ab", "rl", "pn", "un", "dl"):
            header[2] = self.boot
        if header[0] == "rl":
            header[3] = self.lease
        if header[0] == "cm":
            for i, offset in enumerate(self.offered):
                self.arena[offset : offset + PAGE] = left_by_release.session_page(i)
        self.socket.send_multipart([msgspec.msgpack.encode(header), *frames[1:]])

    def hear(self) -> tuple[list[Any], list[bytes]]:
        assert self.socket.poll(5000), "no answer"
        first, *buffers = self.socket.recv_multipart()
        header = msgspec.msgpack.decode(first)
        if header[0] == "wl":
            self.boot = header[3]
            self._take_up_lifeline(header[4], header[5], header[12])
        elif header[0] == "re":
            self.offered = np.frombuffer(buffers[2], "<u8").tolist()
        elif header[0] == "ll":
            self.lease = header[2]
        return header, buffers

    def page(self, offset: int) -> bytes:
        return self.arena[offset : offset + PAGE].tobytes()

    def _take_up_lifeline(self, number: int, secret: bytes, arenas: list[list[Any]]) -> None:
        line = self.line = socket.socket(socket.AF_UNIX)
        line.settimeout(5)
        line.connect(str(self.path.with_suffix(".life")))
        line.sendall(struct.pack("<4sI32s", b"kvlf", number, secret))
        _, ancillary, _, _ = line.recvmsg(2, socket.CMSG_SPACE(8 * 4))
        files = array.array("i", ancillary[0][2])
        tiers = [arena[0] for arena in arenas]
        self.arena = np.memmap(f"/proc/self/fd/{files[tiers.index(1)]}", np.uint8, "r+")

    def close(self) -> None:
        if self.line is not None:
            self.line.close()
        self.context.destroy(linger=0)


def session(left: Path) -> list[tuple[str, list[bytes]]]:
    said = json.loads((left / "session.json").read_text())
    return [(whose, [base64.b64decode(frame) for frame in frames]) for whose, frames in said]


def same_kind(then: Any, now: Any) -> bool:
    """Could a client that knows the one read the other? It skips what was appended."""
    if isinstance(then, list) and isinstance(now, list):
        return len(now) >= len(then) and all(map(same_kind, then, now))
    if isinstance(then, dict) and isinstance(now, dict):
        return all(key in now and same_kind(value, now[key]) for key, value in then.items())
    numbers = (int, float)
    return type(then) is type(now) or (isinstance(then, numbers) and isinstance(now, numbers))


def test_a_client_of_the_release_is_served(left: Path, agent: SmallAgent) -> None:
    client = OldClient(agent.socket())
    asked = set()
    try:
        for whose, then in session(left):
            if whose == "client":
                client.say(then)
                asked.add(msgspec.msgpack.decode(then[0])[0])
                continue
            expected = msgspec.msgpack.decode(then[0])
            header, buffers = client.hear()
            assert header[:2] == expected[:2], header
            assert same_kind(expected, header), header
            assert len(buffers) == len(then) - 1
            kind = header[0]
            if kind == "wl":
                assert header[2] == expected[2], "its own version of the protocol"
                assert header[6:9] == expected[6:9], "page, slot and tokens"
            elif kind == "lo":
                assert header == expected
            if kind in ("lo", "co", "pd", "de"):
                assert buffers == then[1:]
            if kind == "ll":
                assert buffers[0] == then[1]
                assert buffers[3] == then[4], "checksums as that client counts them"
                offsets, sums = (np.frombuffer(buffers[i], "<u8").tolist() for i in (2, 3))
                for i, (offset, checksum) in enumerate(zip(offsets, sums, strict=True)):
                    page = client.page(offset)
                    assert page == left_by_release.session_page(i).tobytes()
                    assert xxhash.xxh3_64_intdigest(page) == checksum
    finally:
        client.close()
    assert asked >= {"hi", "lk", "rs", "cm", "ld", "rl", "pn", "un", "dl", "st", "by"}
    agent.call(lambda: check_books(agent.core.cache))


def test_answers_of_the_release_are_understood(left: Path) -> None:
    """By a client of today: agents of both releases run while a cluster is updated."""
    count = 0
    for whose, frames in session(left):
        if whose == "agent":
            tag, number, *_ = msgspec.msgpack.decode(frames[0])
            reply = protocol.decode_reply(frames[0])
            assert type(reply).__struct_config__.tag == tag
            assert reply.id == number
            count += 1
        else:
            protocol.decode_request(frames[0])
    assert count >= 8
    welcome = protocol.decode_reply(session(left)[1][1][0])
    assert isinstance(welcome, protocol.Welcome)
    assert protocol.OLDEST_PROTOCOL <= welcome.protocol <= protocol.PROTOCOL


def test_little_is_kept(left: Path) -> None:
    assert sum(path.stat().st_size for path in left.iterdir()) < 300 << 10
