"""The shape of a page: how many bytes the KV of `page_tokens` tokens takes on one rank.

Bytes per token come from the model, never from a constant: 2 (K and V) x layers x KV heads x head
size x bytes per element, divided over the tensor-parallel ranks. Llama-3-70B in bf16 (80 layers,
8 KV heads of 128) is 320 KiB per token, 80 KiB per rank at TP 4.

A page is stored layer by layer, and cut into *transfer units*, groups of whole layers, each moved
by one I/O and with a checksum of its own (`cache.units`).
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from kvtier_agent.cache.identity import KEY_BYTES, PERSON, frame

ALIGNMENT = 4096
"""Slots start on multiples of this many bytes, so that O_DIRECT can use them in place."""

MAX_PAGE_BYTES = 1 << 30
"""One page is at most 1 GiB: a registered I/O buffer cannot be larger."""

UNIT_BYTES = 1 << 20
"""A transfer unit is the largest group of whole layers of at most so many bytes; one layer at
least."""

MAX_UNITS = 480
"""Units of a page at most: their checksums share one block of 4096 bytes with the header of a slot
in a segment file. Where there were more, the groups are larger."""

MAX_TP = 1024
"""Ranks of a tensor-parallel group: each has a record and a slot for its part of every page."""


class GeometryError(ValueError):
    """A geometry that makes no sense; the message says what to write instead."""


def align_up(size: int, to: int = ALIGNMENT) -> int:
    """`size` rounded up to a multiple of `to` bytes."""
    return -(-size // to) * to


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the bytes of a page mean. Two clients share pages only if all of it is equal.

    Fields: `layers`, `kv_heads` (over all ranks), `head_size`, `dtype_bytes` (per element), `tp`
    (tensor-parallel size), `page_tokens`; and, for identity only, `weights` (revision of the
    weights), `dtype` (name of the KV dtype), `layout` (memory layout, instruction set included).
    """

    layers: int
    kv_heads: int
    head_size: int
    dtype_bytes: int
    page_tokens: int
    tp: int = 1
    weights: str = ""
    dtype: str = ""
    layout: str = ""

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_size", "dtype_bytes", "page_tokens", "tp"):
            value = getattr(self, name)
            if not 1 <= value < 1 << 32:
                raise GeometryError(f"{name} is {value}; write a whole number of at least 1")
        if (2 * self.layers * self.kv_heads * self.head_size * self.dtype_bytes) % self.tp:
            raise GeometryError(
                f"the KV of a token does not divide over tp={self.tp} ranks;"
                " write a tp that divides layers x kv_heads x head_size"
            )
        if self.tp > MAX_TP:
            raise GeometryError(f"tp is {self.tp}; write a number of ranks from 1 to {MAX_TP}")
        if self.page_bytes > MAX_PAGE_BYTES:
            raise GeometryError(
                f"a page would be {self.page_bytes} bytes, the limit is {MAX_PAGE_BYTES};"
                " write a smaller page_tokens"
            )

    @classmethod
    def of_page_bytes(cls, page_bytes: int, page_tokens: int, *, weights: str = "") -> Geometry:
        """A geometry of one layer and head with pages of exactly `page_bytes`.

        For replay and tests, where only the size matters. `page_bytes` must be a multiple of
        2 x `page_tokens`.
        """
        if page_tokens < 1 or page_bytes < 2 * page_tokens or page_bytes % (2 * page_tokens):
            raise GeometryError(
                f"page bytes {page_bytes} with {page_tokens} tokens a page:"
                f" write a multiple of {2 * max(page_tokens, 1)}"
            )
        return cls(
            layers=1,
            kv_heads=1,
            head_size=page_bytes // (2 * page_tokens),
            dtype_bytes=1,
            page_tokens=page_tokens,
            weights=weights,
            dtype="raw",
            layout="raw",
        )

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV per token on one rank."""
        return 2 * self.layers * self.kv_heads * self.head_size * self.dtype_bytes // self.tp

    @property
    def page_bytes(self) -> int:
        """Bytes of one full page on one rank."""
        return self.bytes_per_token * self.page_tokens

    @property
    def unit_layers(self) -> int:
        """Layers of a transfer unit; the last one of a page may have fewer. All of them, and so one
        unit, in a page that is small enough, or in which a layer is no whole number of bytes."""
        layer, rest = divmod(self.page_bytes, self.layers)
        if rest or self.page_bytes <= UNIT_BYTES:
            return self.layers
        return max(1, UNIT_BYTES // layer, -(-self.layers // MAX_UNITS))

    @property
    def units(self) -> int:
        """Transfer units of a page, 1 to `MAX_UNITS`."""
        return -(-self.layers // self.unit_layers)

    @property
    def unit_bytes(self) -> int:
        """Bytes of every transfer unit but the last one, which has what is left of the page."""
        if self.units == 1:
            return self.page_bytes
        return self.page_bytes // self.layers * self.unit_layers

    @property
    def payload_bytes(self) -> int:
        """Bytes that a page takes: rounded up to 4096."""
        return align_up(self.page_bytes)

    @property
    def slot_bytes(self) -> int:
        """Bytes of an arena slot: the page's, and where it has several units a block of 4096 with
        their checksums."""
        payload = self.payload_bytes
        if payload <= UNIT_BYTES:  # asked with every load
            return payload
        return payload + (ALIGNMENT if self.units > 1 else 0)

    @property
    def nvme_slot_bytes(self) -> int:
        """Bytes of a slot in a segment file: a header of 4096, and the page's."""
        return ALIGNMENT + self.payload_bytes

    @property
    def stored_as(self) -> bytes:
        """16 bytes that name how pages lie in memory and in files, checksums included: the
        fingerprint, and where a page has several units, how it is cut. Those that keep such a page
        in one piece, as earlier versions did, name it by the fingerprint alone."""
        if self.units == 1:
            return self.fingerprint
        cut = self.unit_bytes.to_bytes(8, "little")
        return blake2b(
            frame(b"U", self.fingerprint, cut), digest_size=KEY_BYTES, person=PERSON
        ).digest()

    @property
    def fingerprint(self) -> bytes:
        """16 bytes that name everything a page's bytes depend on besides its tokens."""
        return blake2b(
            frame(
                b"F",
                self.weights.encode(),
                self.dtype.encode(),
                self.layout.encode(),
                *(
                    n.to_bytes(4, "little")
                    for n in (
                        self.layers,
                        self.kv_heads,
                        self.head_size,
                        self.dtype_bytes,
                        self.page_tokens,
                        self.tp,
                    )
                ),
            ),
            digest_size=KEY_BYTES,
            person=PERSON,
        ).digest()
