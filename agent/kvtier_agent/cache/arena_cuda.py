"""L0 in device memory: chunks of uint8 tensors, exported to other processes by CUDA IPC handles.

A growing L0 gets more chunks; one that shrinks keeps them for the next growth. A slot never
crosses a chunk. A client opens each chunk's handle once, when it connects, so a chunk must stay
what it is for as long as clients may have it open: chunks are freed only with the arena.

CUDA IPC may be refused between containers (no shared IPC or PID namespace): then opening raises in
the client and L0 serves the agent's own process only.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.arena import ArenaError, Progress, unseen
from kvtier_agent.cache.geometry import align_up

CHUNK_BYTES = 256 << 20


class CudaArena:
    """Device memory of one tier. `kind` is `cuda`."""

    kind = "cuda"

    def __init__(self, device: str, maximum_bytes: int, slot_bytes: int) -> None:
        """No memory yet. Raises ArenaError when there is no such device."""
        import torch

        self._torch = torch
        try:
            self.device = torch.device(device)
            torch.cuda.get_device_properties(self.device)
        except Exception as error:
            raise ArenaError(f"device {device} cannot be used: {error}") from error
        self.slot_bytes = slot_bytes
        self.chunk_slots = max(1, CHUNK_BYTES // slot_bytes)
        self.chunk_bytes = self.chunk_slots * slot_bytes
        self.size_bytes = align_up(maximum_bytes, self.chunk_bytes)
        self.chunks: dict[int, Any] = {}

    def back_slots(
        self, slots: NDArray[np.uint32], slot_bytes: int, progress: Progress = unseen
    ) -> None:
        """Allocate the chunks that these slots lie in; all or nothing. Raises ArenaError."""
        new = sorted(set((slots // self.chunk_slots).tolist()) - set(self.chunks))
        made: dict[int, Any] = {}
        try:
            for number in new:
                made[number] = self._torch.empty(
                    (self.chunk_slots, self.slot_bytes), dtype=self._torch.uint8, device=self.device
                )
                progress()
        except self._torch.cuda.OutOfMemoryError as error:
            raise ArenaError(
                f"no device memory for {len(new) * self.chunk_bytes} bytes of L0;"
                " make tiers.hbm smaller"
            ) from error
        self.chunks.update(made)

    def punch(self, slots: NDArray[np.uint32], slot_bytes: int) -> None:
        """Nothing: clients have the chunks open (see the module's story)."""

    def gather(self, slots: NDArray[np.uint32], out: NDArray[np.uint8]) -> None:
        """Copy slots to host rows: out[i] = slot slots[i] (first out.shape[1] bytes)."""
        torch = self._torch
        host = torch.from_numpy(out)
        for number, where in self._by_chunk(slots):
            index = torch.from_numpy((slots[where] % self.chunk_slots).astype(np.int64))
            rows = self.chunks[number].index_select(0, index.to(self.device))
            host[torch.from_numpy(where)] = rows[:, : out.shape[1]].cpu()

    def scatter(self, slots: NDArray[np.uint32], rows: NDArray[np.uint8]) -> None:
        """Copy host rows to slots, and wait until the device has them."""
        torch = self._torch
        for number, where in self._by_chunk(slots):
            index = torch.from_numpy((slots[where] % self.chunk_slots).astype(np.int64))
            source = torch.from_numpy(rows[where]).to(self.device)
            self.chunks[number][:, : rows.shape[1]].index_copy_(0, index.to(self.device), source)
        torch.cuda.synchronize(self.device)

    def handles(self) -> tuple[bytes, ...]:
        """One IPC handle per chunk, in order; empty for a chunk that was never made."""
        last = max(self.chunks, default=-1)
        out = []
        for number in range(last + 1):
            chunk = self.chunks.get(number)
            storage = None if chunk is None else chunk.untyped_storage()._share_cuda_()
            out.append(b"" if storage is None else pickle.dumps(storage))
        return tuple(out)

    def close(self) -> None:
        self.chunks.clear()

    def _by_chunk(self, slots: NDArray[np.uint32]) -> list[tuple[int, NDArray[np.intp]]]:
        chunk = slots // self.chunk_slots
        return [(int(number), np.flatnonzero(chunk == number)) for number in np.unique(chunk)]


class DeviceView:
    """A client's side: chunks opened from their handles."""

    def __init__(self, info: Any) -> None:
        """Raises what torch raises when a handle cannot be opened."""
        import torch

        self._chunk_bytes = int(info.chunk_bytes)
        self._chunks: list[Any] = []
        for handle in info.handles:
            if not handle:
                self._chunks.append(None)
                continue
            # The agent is trusted: it owns the memory that is being mapped.
            storage = torch.UntypedStorage._new_shared_cuda(*pickle.loads(handle))  # noqa: S301
            self._chunks.append(torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage))

    def __getitem__(self, span: slice) -> Any:
        """The bytes [start, stop) of the arena as a uint8 tensor; they lie in one chunk."""
        start, stop = int(span.start), int(span.stop)
        number, offset = divmod(start, self._chunk_bytes)
        chunk = self._chunks[number] if number < len(self._chunks) else None
        if chunk is None or offset + stop - start > self._chunk_bytes:
            raise IndexError(f"bytes {start} to {stop} are in no chunk of this arena")
        return chunk[offset : offset + stop - start]
