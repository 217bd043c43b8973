"""Page identity: which 16 bytes name a page.

A page's key is a chained hash, so it names the page's tokens *and everything before them*:

    fingerprint = H("F", weights, dtype, layout, layers, ...)        (`Geometry.fingerprint`)
    root        = H("R", fingerprint, tenant salt)
    key         = H("P", parent key, token ids as u32 little-endian, extras...)
    key         = H("D", parent key, digest)                         (an engine's own block hash)
    part        = key XOR H("T", tp, rank)                           (one rank's part, where tp > 1)

H is BLAKE2b with 16 bytes of digest, personalised `kvtier-page-1`. What goes in is framed without
ambiguity: one tag byte, then each field as its length (u32 little-endian) and its bytes. So no two
different lists of fields give the same input, and a page hashed from tokens can never collide with
one named by a digest.

`H("D", ...)` is for vLLM's sha256 block hash of the page's last block: it is stable across
processes and already covers tokens, LoRA, multimodal hashes and the cache salt, but not the model,
dtype or layout; those come in through the root.

Keys are seed-free: the same input gives the same key in every process and on every machine
(`tests/contract/vectors/page_identity.json`).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 16
PERSON = b"kvtier-page-1"
KEY_VERSION = 1
NO_PARENT = bytes(KEY_BYTES)
"""What a record says when the parent of its page is not known to the cache."""

KeyArray = NDArray[np.uint8]
"""Keys in prefix order: shape (n, 16), uint8, C-contiguous."""


def frame(tag: bytes, *fields: bytes) -> bytes:
    """The unambiguous input of H: `tag`, then (u32 LE length, bytes) per field."""
    parts = [tag]
    for field in fields:
        parts.append(len(field).to_bytes(4, "little"))
        parts.append(field)
    return b"".join(parts)


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=KEY_BYTES, person=PERSON).digest()


def root_key(fingerprint: bytes, tenant_salt: bytes = b"") -> bytes:
    """The parent of every first page of one model, layout and tenant."""
    return _hash(frame(b"R", fingerprint, tenant_salt))


def rank_mask(rank: int, tp: int) -> bytes:
    """What turns the key of a page into that of one rank's part of it, by XOR, in a tensor-parallel
    group of `tp` ranks; zeros where there is one rank, so that its part is the page."""
    if tp == 1:
        return bytes(KEY_BYTES)
    return _hash(frame(b"T", tp.to_bytes(4, "little"), rank.to_bytes(4, "little")))


def child_key(
    parent: bytes, tokens: Sequence[int] | NDArray[np.uint32], extras: Sequence[bytes] = ()
) -> bytes:
    """The key of the page that holds `tokens` (ids) after `parent`.

    `extras`: LoRA id, multimodal hashes, cache salt, in an order the caller keeps; each counts,
    and so does their number. Raises ValueError for a parent that is no key.
    """
    _check_parent(parent)
    ids = np.ascontiguousarray(tokens, dtype="<u4").tobytes()
    return _hash(frame(b"P", parent, ids, *extras))


def child_key_from_digest(parent: bytes, digest: bytes) -> bytes:
    """The key of a page whose tokens and extras are covered by an engine's block hash.

    `digest`: 16 to 64 bytes, for vLLM the 32-byte sha256 hash of the page's last block.
    """
    _check_parent(parent)
    if not 16 <= len(digest) <= 64:
        raise ValueError(f"a digest of {len(digest)} bytes: give 16 to 64, such as a sha256")
    return _hash(frame(b"D", parent, digest))


def chain_keys(
    root: bytes,
    tokens: Sequence[int] | NDArray[np.uint32],
    page_tokens: int,
    extras: Sequence[bytes] = (),
) -> KeyArray:
    """Keys of all pages of a sequence, the last possibly partial: (ceil(len / page_tokens), 16)."""
    ids = np.ascontiguousarray(tokens, dtype="<u4")
    keys = bytearray()
    parent = root
    for start in range(0, len(ids), page_tokens):
        parent = child_key(parent, ids[start : start + page_tokens], extras)
        keys += parent
    return as_keys(bytes(keys))


def chain_keys_from_digests(root: bytes, digests: Sequence[bytes]) -> KeyArray:
    """Keys of a chain whose pages are named by an engine's block hashes: (len(digests), 16)."""
    keys = bytearray()
    parent = root
    for digest in digests:
        parent = child_key_from_digest(parent, digest)
        keys += parent
    return as_keys(bytes(keys))


def as_keys(buffer: bytes | bytearray | memoryview) -> KeyArray:
    """A buffer of n x 16 bytes as a (n, 16) array (no copy). ValueError for another length."""
    flat = np.frombuffer(buffer, dtype=np.uint8)
    if flat.size % KEY_BYTES:
        raise ValueError(f"{flat.size} bytes of keys are no multiple of {KEY_BYTES}")
    return flat.reshape(-1, KEY_BYTES)


def _check_parent(parent: bytes) -> None:
    if len(parent) != KEY_BYTES:
        raise ValueError(f"a parent key of {len(parent)} bytes: give {KEY_BYTES}, or root_key(..)")
