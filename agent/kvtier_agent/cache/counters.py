"""What happened since the process started: cumulative counts, each named once."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counters:
    """Pages unless the name says bytes or tokens. A page of `load` is a hit when it was delivered;
    `misses` are told by the server (`Cache.record_misses`)."""

    hits_l0: int = 0
    hits_l1: int = 0
    hits_l2: int = 0
    misses: int = 0
    hit_tokens: int = 0
    hit_tokens_l0: int = 0
    hit_tokens_l1: int = 0
    hit_tokens_l2: int = 0
    miss_tokens: int = 0
    offered: int = 0
    committed: int = 0
    aborted: int = 0
    refused_value: int = 0
    refused_space: int = 0
    refused_busy: int = 0
    refused_closed: int = 0
    refused_quota: int = 0
    stored_l0: int = 0  # pages that entered the tier: puts, promotions
    stored_l1: int = 0
    stored_l2: int = 0
    stored_bytes_l0: int = 0
    stored_bytes_l1: int = 0
    stored_bytes_l2: int = 0  # payload bytes written to NVMe, compaction included
    compacted_pages: int = 0  # of stored_l2: moved out of segments that were emptied
    compacted_bytes: int = 0  # of stored_bytes_l2: the same
    demoted_l0: int = 0  # left the tier downwards
    demoted_l1: int = 0
    promoted_l1: int = 0  # left the tier upwards
    promoted_l2: int = 0  # read up into L1
    read_bytes_l2: int = 0  # payload bytes of those
    evicted_l0: int = 0  # lost from the cache while in this tier
    evicted_l1: int = 0
    evicted_l2: int = 0
    emergency_evicted: int = 0  # of evicted_l1: because writing to NVMe could not keep up
    quota_evicted: int = 0  # of these: because their tenant had all that its quota gives it
    l2_copies_dropped: int = 0
    quarantined_pages: int = 0
    unwritten_pages: int = 0  # in the journal, and kept from their slots by a power cut
    quarantined_slots: int = 0  # L2 slots that held a bad or unreadable page
    suspected_segments: int = 0  # times a segment of L2 was found to have such slots
    scrubbed_segments: int = 0  # of those, tested and good
    taken_over_pages: int = 0  # found in L1 at the start
    dropped_at_start_pages: int = 0  # of the process before, and not taken over
    found_pages: int = 0  # found in L2 at the start, and indexed again
    dropped_found_pages: int = 0  # found in L2 at the start, and not kept
    scrubbed_pages: int = 0  # of those taken over, read and compared with their checksum
    scrub_bad_pages: int = 0  # of those, bad (and among quarantined_pages)
    early_units: int = 0  # units announced before their page was complete
    late_pages: int = 0  # landed after the deadline of the load that waited
    failed_moves: int = 0  # pages whose copy failed for any reason
    cancelled_moves: int = 0  # pages that were pinned while being moved, or not tried
    pinned: int = 0  # pins made
    refused_pins: int = 0
    lost_pins: int = 0  # ended by the cache: a tier shrank, a read failed, all was dropped
    expired_pins: int = 0  # of clients that were silent for too long
    deleted_pages: int = 0  # marked by `delete`
    expired_leases: int = 0
    expired_reservations: int = 0
    clients_gone: int = 0
    tightened: int = 0  # times the level rose to Tighten
    demote_all: int = 0  # times the level rose to Demote

    def as_dict(self) -> dict[str, int]:
        return asdict(self)
