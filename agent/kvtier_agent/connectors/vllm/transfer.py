"""The worker's copies between the engine's blocks and the node's tiers, in groups of pages.

A long prefix is gigabytes, so it moves in groups: one buffer in host memory, as large as a group
and used again, and for each group a wait of its own. A drive that brings a group in time brings a
prefix of any length; a group that comes short is the end of it.

Saving asks first: an engine offers all pages of a request's prefix, and nearly always the agent has
them. Only what it wants is copied off the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from kvtier_agent.cache.identity import as_keys
from kvtier_agent.connectors.vllm.layout import BlockCopier, EngineLayout
from kvtier_agent.connectors.vllm.plan import LoadPages, SavePages, request_number
from kvtier_agent.connectors.vllm.settings import ConnectorSettings
from kvtier_agent.server.mapping import UnmappedError


class Tiers(Protocol):
    """What is needed of `kvtier_agent.server.client.Client`."""

    def load(self, keys: Any, *, deadline_milliseconds: int | None, request: int) -> Any: ...

    def reserve(
        self, keys: Any, *, depth: int, parent: bytes, tokens_per_second: float | None
    ) -> Any: ...


class PageTransfer:
    """Loads and saves what the plan of a step says. Lives on the worker's thread."""

    def __init__(
        self,
        tiers: Tiers,
        copier: BlockCopier,
        layout: EngineLayout,
        settings: ConnectorSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tiers = tiers
        self._copier = copier
        self._layout = layout
        self._settings = settings
        self._clock = clock
        self._group = max(1, settings.group_bytes // layout.geometry.page_bytes)
        self._rows: torch.Tensor | None = None

    def load(self, load: LoadPages, until: float) -> tuple[int, ...]:
        """Copy pages in; the blocks that could not be filled, in order, blanked.

        until: the clock's time after which no further group is asked for.
        """
        per_page = self._layout.blocks_per_page
        done = 0
        while done < len(load.keys):
            keys = load.keys[done : done + self._group]
            left = min(self._settings.load_timeout_seconds, until - self._clock())
            if left <= 0:
                break
            usable = self._load_group(keys, request_number(load.request_id), left)
            if usable:
                self._copier.scatter(
                    self._buffer()[:usable],
                    load.block_ids[done * per_page : (done + usable) * per_page],
                    max(0, load.skip_blocks - done * per_page),
                )
            done += usable
            if usable < len(keys):
                break
        if done == len(load.keys):
            return ()
        # vLLM recomputes from the first bad block on; nothing behind it may stay as it is.
        bad = load.block_ids[max(done * per_page, load.skip_blocks) :]
        self._copier.zero(bad)
        return bad

    def _load_group(self, keys: tuple[bytes, ...], request: int, wait_seconds: float) -> int:
        """How many pages from the first on are in the buffer, verified."""
        with self._tiers.load(
            as_keys(b"".join(keys)),
            deadline_milliseconds=max(1, int(wait_seconds * 1000)),
            request=request,
        ) as lease:
            good = lease.copy_to(self._buffer()[: len(keys)])
        return len(keys) if good.all() else int(good.argmin())

    def save(self, save: SavePages, tokens_per_second: float | None) -> int:
        """Offer pages, and copy out those that the agent has room for; how many it took.

        tokens_per_second: the prefill speed that the engine measured, None = not yet.
        """
        reservation = self._tiers.reserve(
            as_keys(b"".join(save.keys)),
            depth=save.first_page * self._layout.geometry.page_tokens,
            parent=save.parent,
            tokens_per_second=tokens_per_second,
        )
        wanted: list[int] = reservation.offered.tolist()
        if not wanted:
            return 0
        try:
            for start in range(0, len(wanted), self._group):
                self._save_group(save, reservation, wanted[start : start + self._group])
        except UnmappedError:
            reservation.outgrown()
            return 0
        except BaseException:
            reservation.abort()
            raise
        reservation.commit()
        return len(wanted)

    def _save_group(self, save: SavePages, reservation: Any, pages: list[int]) -> None:
        per_page = self._layout.blocks_per_page
        rows = self._buffer()[: len(pages)]
        blocks = [b for i in pages for b in save.block_ids[i * per_page : (i + 1) * per_page]]
        self._copier.gather(blocks, rows)
        for page, row in zip(pages, rows.numpy(), strict=True):
            reservation.write(page, row)

    def _buffer(self) -> torch.Tensor:
        """Room for a group; memory that the device reaches itself, where there is one."""
        if self._rows is None:
            self._rows = torch.empty(
                (self._group, self._layout.geometry.page_bytes),
                dtype=torch.uint8,
                pin_memory=self._copier.device.type == "cuda",
            )
        return self._rows
