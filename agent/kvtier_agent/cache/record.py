"""The 128-byte record of one page, its states, and the one table of allowed transitions.

The record is what clients and `kvtier inspect` read from another process, so its layout is
versioned (`page_table.LAYOUT_VERSION`) and every change of more than one word happens inside a
seqlock: `seq` is odd while the record is being changed.

A page is in one state, and the state alone says which slots it owns and where it may be read:

    state     owns slots      readable from   meaning
    FREE      -               -               the row is unused
    WRITING   L0 or L1        -               reserved; a client is writing the bytes
    IN0       L0              L0              resident in HBM
    DOWN01    L0, L1          L0              copy to DRAM under way
    IN1       L1 (, L2 copy)  L1              resident in DRAM, perhaps with its clean copy in NVMe
    UP10      L1, L0 (, copy) L1              copy to HBM under way
    DOWN12    L1, L2          L1              write to NVMe under way (dirty: not evictable)
    IN2       L2              -               in NVMe only
    UP21      L2, L1          -               read from NVMe under way; loads wait for it

Tiers are exclusive, but for the clean L2 copy that a page in L1 may keep.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

RECORD = np.dtype(
    {
        "names": [
            "seq",
            "state",
            "tiers",
            "flags",
            "arm",
            "key",
            "parent",
            "checksum",
            "size",
            "depth",
            "l0_slot",
            "l1_slot",
            "l2_slot",
            "parent_row",
            "pins",
            "hits",
            "client",
            "tenant",
            "frozen",
            "last_access",
            "demoted_at",
            "touch",
            "seal",
        ],
        "formats": [
            "<u4",  # seq: seqlock, odd while changing
            "u1",  # state: State
            "u1",  # tiers: bit t set = owns a valid copy in tier t
            "u1",  # flags: Flag
            "u1",  # arm: whose policy's share it counts for; 0 = stable
            ("<u8", 2),  # key
            ("<u8", 2),  # parent key
            "<u8",  # checksum: xxh3-64 of the payload
            "<u4",  # size: payload bytes
            "<u4",  # depth: tokens before the page
            "<u4",  # l0_slot
            "<u4",  # l1_slot
            "<u4",  # l2_slot: global; segment = slot // slots per segment, which names the volume
            "<u4",  # parent_row: where the parent was at insertion (check its key before use)
            "<u4",  # pins: leases and pins that hold the page
            "<u4",  # hits: loads since it was stored
            "<u4",  # client that reserved it
            "<u2",  # tenant: whose page it is (`quotas.tenant_number`), 0 = nobody's
            "<u2",  # frozen: id of the frozen prefix, 0 = none
            "<f8",  # last_access: seconds, the cache's clock
            "<f8",  # demoted_at: seconds, 0 = never
            "<u8",  # touch: stamp of the last touch, unique
            "<u8",  # seal: over what never changes after commit; see `seals`
        ],
        "offsets": [
            *(0, 4, 5, 6, 7, 8, 24, 40, 48, 52, 56, 60, 64, 68, 72, 76, 80, 84, 86),
            *(88, 96, 104, 112),
        ],
        "itemsize": 128,
    }
)

NO_SLOT = 0xFFFFFFFF
NO_ROW = 0xFFFFFFFF

Rows = NDArray[np.uint32]


class State(IntEnum):
    """See the table above. Arrays are compared with `int(State.X)`: of a member of an enum numpy
    makes sense five times as slowly."""

    FREE = 0
    WRITING = 1
    IN0 = 2
    DOWN01 = 3
    IN1 = 4
    UP10 = 5
    DOWN12 = 6
    IN2 = 7
    UP21 = 8


class Flag(IntEnum):
    """Bits of `flags`."""

    EXEMPT = 1  # frozen and inside its prefix's budget: no thresholds, never evicted out of L0
    PARTIAL = 2  # not a full page: never stored below L0
    L2_CLEAN = 4  # the copy in L2 equals the page
    DOOMED = 8  # out of the index; its slots go when the last pin or move ends
    PINNED = 16  # a client pinned it (it counts in `pins` too)


TRANSITIONS: dict[State, tuple[State, ...]] = {
    # reserve; taken over from the process before; found on a volume at start
    State.FREE: (State.WRITING, State.IN1, State.IN2),
    State.WRITING: (State.IN0, State.IN1, State.FREE),  # commit; abort
    State.IN0: (State.DOWN01, State.FREE),
    State.DOWN01: (State.IN1, State.IN0, State.FREE),  # done; failed or pinned meanwhile; doomed
    State.IN1: (State.UP10, State.DOWN12, State.IN2, State.FREE),  # IN2: clean copy, drop from L1
    State.UP10: (State.IN0, State.IN1, State.FREE),
    State.DOWN12: (State.IN2, State.IN1, State.FREE),  # IN1: failed, or pinned and now clean
    State.IN2: (State.UP21, State.FREE),
    State.UP21: (State.IN1, State.IN2, State.FREE),  # IN2: not tried; FREE: bad or unreadable
}

_ALLOWED = np.zeros((16, 16), dtype=bool)
for _old, _news in TRANSITIONS.items():
    for _new in _news:
        _ALLOWED[_old, _new] = True


def _mask(*states: State) -> NDArray[np.bool_]:
    table = np.zeros(16, dtype=bool)
    table[list(states)] = True
    return table


READ_L0 = _mask(State.IN0, State.DOWN01)
"""Indexed by state: bytes may be read from the L0 slot."""
READ_L1 = _mask(State.IN1, State.UP10, State.DOWN12)
READ_L2 = _mask(State.IN2, State.UP21)
READABLE = READ_L0 | READ_L1 | READ_L2
MOVING = _mask(State.DOWN01, State.UP10, State.DOWN12, State.UP21)
"""A mover is at work on the page: its slots must not be reused."""

TIER_OF_STATE = np.full(16, 255, dtype=np.uint8)
TIER_OF_STATE[READ_L0] = 0
TIER_OF_STATE[READ_L1] = 1
TIER_OF_STATE[READ_L2] = 2


class StateError(AssertionError):
    """A page was about to change state in a way the table does not allow: a bug, never served."""


def check_transition(old: NDArray[np.uint8], new: State) -> None:
    """Raise StateError unless every `old` state may become `new`. Vectorised."""
    allowed = _ALLOWED[old, int(new)]
    if not allowed.all():
        bad = State(int(old[np.flatnonzero(~allowed)[0]]))
        raise StateError(f"{bad.name} -> {new.name} is not an allowed transition")


def seals(records: NDArray[Any]) -> NDArray[np.uint64]:
    """Of each record a hash over key, parent, checksum, size and depth, which are what they are
    from commit on. A record whose `seal` differs was damaged: its key may not belong to its
    checksum any more. FNV-1a over 64-bit words, with a shift so that high bits count."""
    mixed = np.full(len(records), 0xCBF29CE484222325, dtype=np.uint64)
    key, parent = records["key"], records["parent"]
    for word in (
        *(key[:, 0], key[:, 1], parent[:, 0], parent[:, 1], records["checksum"]),
        records["size"].astype(np.uint64) | records["depth"].astype(np.uint64) << np.uint64(32),
    ):
        mixed = (mixed ^ word) * np.uint64(0x100000001B3)
        mixed ^= mixed >> np.uint64(29)
    return mixed


def as_u64_pairs(keys: NDArray[Any]) -> NDArray[np.uint64]:
    """Keys (n, 16) uint8 as (n, 2) uint64, without a copy where possible."""
    return np.ascontiguousarray(keys, dtype=np.uint8).view("<u8").reshape(-1, 2)


def as_bytes_keys(pairs: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """The inverse: (n, 2) uint64 as (n, 16) uint8."""
    return np.ascontiguousarray(pairs).view(np.uint8).reshape(-1, 16)
