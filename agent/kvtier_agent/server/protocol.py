"""What crosses the socket: small headers, whole buffers of keys, never a page.

A message is a list of frames: a msgpack header (one of the tagged structs below), then raw
buffers, little-endian and contiguous. Keys travel as ``n * 16`` bytes, answers as one buffer per
column, so that neither side runs Python per page to pack or unpack them.

=============  ==========================  ==============================================
request        buffers                     reply and its buffers
=============  ==========================  ==============================================
``Hello``      -                           ``Welcome``
``Lookup``     keys                        ``Looked``: tier u8[n]
``Reserve``    keys                        ``Reserved``: status u8[n], arena u8[n], offset u64[n]
``Commit``     keys, checksum u64[n]       ``Committed``: status u8[n]
``Load``       keys                        ``Loaded``: tier u8[n], arena u8[n], offset u64[n],
                                           checksum u64[n]; of a layered one landed u16[n] too
``Await``      -                           ``Landed``: landed u16[n] of the keys of its load
``Pin``        keys                        ``Pinned``: status u8[n], tier u8[n]
``Delete``     keys                        ``Deleted``: status u8[n]
``Stats``      -                           ``Statistics``
``Ping``       -                           ``Pong``
``Abort``      keys                        none (one way)
``Unpin``      keys                        none (one way)
``Release``    index u32[m] of bad pages   none (one way)
``Bye``        -                           none (one way)
=============  ==========================  ==============================================

Any request may be answered by ``Refused`` instead. Structs are arrays on the wire: a newer
version may append fields that have defaults, and an older peer skips them. Anything else is a new
``PROTOCOL``; both sides say the range they speak in ``Hello`` and take the highest in common, so
that an agent serves clients one version behind and the reverse.

Beside each message socket there is a *lifeline*, a plain Unix stream: the client proves who it is
with the secret of its ``Welcome`` and receives the arenas as open file descriptors
(``LIFELINE_*`` below). When it ends, the client is gone and everything it held goes back.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any, Final

import msgspec

from kvtier_agent.cache.geometry import MAX_UNITS, Geometry
from kvtier_agent.cache.identity import KEY_BYTES
from kvtier_agent.server.frames import MalformedError, column, common_version, keys_of, request_id

PROTOCOL: Final = 3
OLDEST_PROTOCOL: Final = 1
"""The oldest version still spoken: that of the release before."""
PINS_SINCE: Final = 2
"""The version that brought ``Pin``, ``Unpin`` and ``Delete``."""
QUOTAS_SINCE: Final = 2
"""The version that brought ``PutStatus.REFUSED_QUOTA``."""
RANKS_SINCE: Final = 2
"""The version that brought ``Hello.rank``: below it every rank of a tensor-parallel group would
count as rank 0, and be given rank 0's bytes."""
UNITS_SINCE: Final = 3
"""The version that brought transfer units, and ``Await``: below it a page is one piece with one
checksum, which for pages of several units means something else."""
ARENA_LAYOUT: Final = 1
"""How pages lie in the arenas: fixed slots, page first, slot rounded up to 4096 bytes; pages of
several transfer units have a block with their sums behind them (``UNITS_SINCE``)."""

MISS: Final = 255
NOT_COMING: Final = 0xFFFF
"""In place of a number of units: the page is a miss."""

MAX_FRAMES: Final = 4
MAX_HEADER_BYTES: Final = 4096
MAX_NAME_BYTES: Final = 128

LEAST_RATE: Final = 1.0
MOST_RATE: Final = 1e9
"""Bounds of an engine's prefill speed, tokens per second: it holds for the whole trust domain."""

LIFELINE_HELLO: Final = struct.Struct("<4sI32s")
"""What a client writes first on its lifeline: magic, client number, secret."""
LIFELINE_MAGIC: Final = b"kvlf"
LIFELINE_ARENAS: Final = struct.Struct("<BB")
"""What the agent answers: 1, and how many descriptors come with it (SCM_RIGHTS)."""


Name = Annotated[str, msgspec.Meta(max_length=256)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
Tenant = Annotated[str, msgspec.Meta(max_length=63, pattern="^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$")]
Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Small = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]


class Code:
    """Why a request was refused; the value of ``Refused.code``."""

    PROTOCOL_VERSION: Final = "protocol-version"
    ARENA_LAYOUT: Final = "arena-layout"
    KEY_VERSION: Final = "key-version"
    GEOMETRY: Final = "geometry"
    UNKNOWN_CLIENT: Final = "unknown-client"
    STALE_BOOT: Final = "stale-boot"
    NO_LIFELINE: Final = "no-lifeline"
    TOO_MANY_CLIENTS: Final = "too-many-clients"
    TOO_MANY_KEYS: Final = "too-many-keys"
    TOO_LARGE: Final = "too-large"
    MALFORMED: Final = "malformed"
    NOT_READY: Final = "not-ready"
    INTERNAL: Final = "internal"


class Request(msgspec.Struct, array_like=True, tag_field="t", frozen=True):
    """What every request carries: ``id`` is echoed in the reply (0 = no reply wanted)."""

    id: Number


class GeometryInfo(msgspec.Struct, array_like=True, frozen=True):
    """A page geometry on the wire: the fields of ``cache.geometry.Geometry``, in its order."""

    layers: Small
    kv_heads: Small
    head_size: Small
    dtype_bytes: Small
    page_tokens: Small
    tp: Small = 1
    weights: Name = ""
    dtype: Name = ""
    layout: Name = ""

    @classmethod
    def of(cls, geometry: Geometry) -> GeometryInfo:
        """``geometry`` as it travels."""
        return cls(*(getattr(geometry, name) for name in cls.__struct_fields__))

    def geometry(self) -> Geometry:
        """The geometry itself; raises ``GeometryError`` where it makes no sense."""
        return Geometry(**{name: getattr(self, name) for name in self.__struct_fields__})


class Hello(Request, tag="hi", frozen=True):
    """First message of a client; the trust domain follows from the socket, not from here."""

    oldest: Small
    newest: Small
    arena_layout: Small
    key_version: Small
    geometry: GeometryInfo
    name: Name = ""
    pid: Number = 0
    probe: bool = False
    """True for health probes: their pages are not counted as hits or misses, and are of one part
    in a tensor-parallel group too."""
    kv_pool_bytes: Number = 0
    """Size of the engine's own KV pool on this rank: the base of ``ratioToHBM`` where L0 is the
    engine's. 0: not told."""
    rank: Small = 0
    """Of ``geometry.tp`` ranks: the keys that this client puts and loads mean its parts of the
    pages."""
    tenant: Tenant = ""
    """For whom its pages count: as it says, for nobody but the socket's group vouches for it."""


class Lookup(Request, tag="lk", frozen=True):
    """Which of these pages are cached, and are they worth loading?"""

    depth: Tokens = 0
    """Tokens in front of the first page."""
    slo_milliseconds: Milliseconds | None = None
    """Time to first token that the request must meet; the policy's where absent."""
    total_tokens: Tokens | None = None
    """Tokens of the whole prompt, for the cost of what has to be computed anyway."""
    request: Number = 0
    """An engine's own number of the request (u63), 0 = this client asks one after the other."""


class Reserve(Request, tag="rs", frozen=True):
    """Slots for new pages, in prefix order."""

    depth: Tokens = 0
    """Tokens in front of the first page."""
    parent: Annotated[bytes, msgspec.Meta(max_length=KEY_BYTES)] = b""
    """Key of the page in front of the first (16 bytes); empty where it is not known."""
    partial_last: bool = False
    """The last page is not full: it is never stored below L0."""
    frozen: Name | None = None
    """Name of the frozen prefix that these pages belong to."""
    tokens_per_second: float | None = None
    """Prefill speed that the engine measured, ``LEAST_RATE`` to ``MOST_RATE``."""


class Commit(Request, tag="cm", frozen=True):
    """The reserved pages were written; ``boot`` fences a reservation of another agent process."""

    boot: Number


class Abort(Request, tag="ab", frozen=True):
    """The reserved pages will not be written."""

    boot: Number


class Load(Request, tag="ld", frozen=True):
    """Pin these pages; pages below DRAM are brought up first, until the deadline."""

    deadline_milliseconds: Milliseconds = 500
    request: Number = 0
    layered: bool = False
    """Answer at once, with the places of pages that are on their way: ``Await`` says how far."""


class Await(Request, tag="aw", frozen=True):
    """Answered when the first ``units`` transfer units of each page of a layered load are there, or
    will not come; at the load's deadline at the latest."""

    boot: Number
    lease: Number
    units: Annotated[int, msgspec.Meta(ge=0, le=MAX_UNITS)]


class Release(Request, tag="rl", frozen=True):
    """The lease ends; the buffer names pages whose bytes did not match their checksum."""

    boot: Number
    lease: Number
    used: bool = True
    """False: nobody read the pages (the answer came too late); then they are no hits."""


class Pin(Request, tag="pn", frozen=True):
    """Keep these pages in memory until they are unpinned or this client ends."""

    boot: Number


class Unpin(Request, tag="un", frozen=True):
    """Pins of this client end."""

    boot: Number


class Delete(Request, tag="dl", frozen=True):
    """No lookup is to find these pages any more."""

    boot: Number


class Stats(Request, tag="st", frozen=True):
    """Counters and gauges of this trust domain."""


class Ping(Request, tag="pi", frozen=True):
    """Is the agent there, and does it still know this client?"""


class Bye(Request, tag="by", frozen=True):
    """The client leaves in good order."""


AnyRequest = (
    Hello | Lookup | Reserve | Commit | Abort | Load | Await | Release | Pin | Unpin | Delete
    | Stats | Ping | Bye
)  # fmt: skip


class Reply(msgspec.Struct, array_like=True, tag_field="t", frozen=True):
    """What every reply carries: the ``id`` of its request."""

    id: int


class ArenaInfo(msgspec.Struct, array_like=True, frozen=True):
    """One arena: ``tier`` 0 or 1. Its descriptor comes over the lifeline, or handles open it."""

    tier: int
    size_bytes: int
    kind: str = "shm"
    """``shm``: shared memory, its descriptor is sent; ``cuda``: CUDA IPC, one handle a chunk."""
    chunk_bytes: int = 0
    handles: list[bytes] = []


class Welcome(Reply, tag="wl", frozen=True):
    """The agent knows this client now; it expects the lifeline within ``grace_milliseconds``."""

    protocol: int
    boot: int
    """Random number of this agent process: a lease of another boot means nothing here."""
    client: int
    secret: bytes
    page_bytes: int
    slot_bytes: int
    page_tokens: int
    max_keys: int
    lease_milliseconds: int
    grace_milliseconds: int
    arenas: list[ArenaInfo]
    version: str = ""
    pin_milliseconds: int = 0
    """Pins end when nothing is heard of their client for so long; 0: the agent knows no pins."""


class Looked(Reply, tag="lo", frozen=True):
    """``prefix``: pages cached without a gap; ``load``: how many of them are worth loading."""

    prefix: int
    load: int
    reason: str = ""


class Reserved(Reply, tag="re", frozen=True):
    """Columns: see the table above; status is ``cache.results.PutStatus``."""


class Committed(Reply, tag="co", frozen=True):
    """Column: ``cache.results.CommitStatus`` of each page."""


class Loaded(Reply, tag="ll", frozen=True):
    """Columns: see the table above; a page that did not come in time has tier 255."""

    lease: int


class Landed(Reply, tag="la", frozen=True):
    """Column: how many transfer units of each page are there, without a gap from the first one on,
    or ``NOT_COMING``. It is empty where the lease has ended."""


class Pinned(Reply, tag="pd", frozen=True):
    """Columns: ``cache.results.PinStatus``, and the tier each page was in."""


class Deleted(Reply, tag="de", frozen=True):
    """Column: ``cache.results.DeleteStatus`` of each page."""


class Statistics(Reply, tag="ss", frozen=True):
    """``values`` is documented in ``server.stats``."""

    values: dict[str, Any]


class Pong(Reply, tag="po", frozen=True):
    """Alive."""

    boot: int


class Refused(Reply, tag="no", frozen=True):
    """The request was not carried out; ``message`` says what to do instead."""

    code: str
    message: str


AnyReply = (
    Welcome | Looked | Reserved | Committed | Loaded | Landed | Pinned | Deleted | Statistics | Pong
    | Refused
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[AnyRequest] = msgspec.msgpack.Decoder(AnyRequest)
_replies: msgspec.msgpack.Decoder[AnyReply] = msgspec.msgpack.Decoder(AnyReply)


def encode(message: Request | Reply) -> bytes:
    """The header frame of ``message``."""
    return _encoder.encode(message)


def decode_request(header: bytes | memoryview) -> AnyRequest:
    """The request in a header frame; raises ``MalformedError``."""
    if len(header) > MAX_HEADER_BYTES:
        raise MalformedError(f"header of {len(header)} bytes, at most {MAX_HEADER_BYTES}")
    try:
        request = _requests.decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedError(str(error)) from None
    if isinstance(request, Reserve):
        rate = request.tokens_per_second
        if rate is not None and not LEAST_RATE <= rate <= MOST_RATE:
            raise MalformedError(
                f"tokens_per_second is {rate:g}, write {LEAST_RATE:g} to {MOST_RATE:g}"
            )
    return request


def decode_reply(header: bytes | memoryview) -> AnyReply:
    """The reply in a header frame; raises ``MalformedError``."""
    try:
        return _replies.decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedError(str(error)) from None


__all__ = ["MalformedError", "column", "common_version", "keys_of", "request_id"]
