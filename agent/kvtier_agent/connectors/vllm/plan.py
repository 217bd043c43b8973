"""What to load and what to save in one scheduler step, without vLLM.

vLLM thinks in blocks (16-128 tokens), kvtier in pages (a multiple of that). The scheduler side
of the connector follows each request's blocks and says, per step, which pages the worker is to
copy in before the forward pass and which pages are complete after it:

    tokens   0        P        2P       3P
    pages    |---0----|---1----|---2----|-- (partial: never saved)
    blocks   |b0 b1 b2|b3 b4 b5|b6 b7 b8|b9
                       ^ local prefix cache ends inside page 1: page 1 is loaded, but only
                         blocks b4, b5 are written - b3 may be in use by another request

The rules that keep this right:

- Only whole pages, and never the whole prompt: vLLM must compute at least one token itself.
- A page is saved once its last token's KV is computed in this step, and only once per request.
- Keys come from vLLM's own block hashes (sha256 over tokens, LoRA, multimodal data, salt),
  chained over pages under a root that names model, dtype, layout and instruction set, and below
  that under one that names the content of the request's LoRA adapter, where it has one. Where
  nobody can tell that content, nothing is loaded and nothing saved.
- A preempted request starts over: its block list is replaced, its saved pages stay saved.
- When a load failed, what is computed behind it rests on wrong KV: by its request, by others that
  share its blocks, and in a step that was scheduled before the failure was known. The worker saves
  nothing until then (`SaveGuard`), of no request, and the planner offers all pages again once vLLM
  has recomputed them; the agent takes those that it does not have.
- `reset`: the weights are others from here on. Pages get names of their own, and a request that
  holds blocks computed before is left out until it starts over.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

KeyChain = Callable[[bytes, bytes], bytes]
"""(parent page key, digest of the page's last block) -> page key."""


def request_number(request_id: str) -> int:
    """The number by which a lookup and its load, made by two processes, meet."""
    return zlib.crc32(request_id.encode()) or 1


@dataclass(frozen=True, slots=True)
class LoadPages:
    """Pages to copy into blocks before the forward pass.

    keys: one 16-byte key per page, in prefix order, from page `first_page` on.
    block_ids: the blocks of these pages, `blocks_per_page` for each, in order.
    skip_blocks: that many leading blocks hold computed KV already and must not be written.
    """

    request_id: str
    keys: tuple[bytes, ...]
    first_page: int
    block_ids: tuple[int, ...]
    skip_blocks: int


@dataclass(frozen=True, slots=True)
class SavePages:
    """Pages complete after this step's forward pass; fields as in `LoadPages`.

    parent: key of the page before the first one, the root for page 0.
    """

    request_id: str
    parent: bytes
    keys: tuple[bytes, ...]
    first_page: int
    block_ids: tuple[int, ...]


@dataclass(slots=True)
class _Tracked:
    hashes: Sequence[bytes]
    adapter: bytes | None
    keys: list[bytes] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    saved_pages: int = 0
    load_first_block: int = 0
    load_end_page: int = 0
    left_out: bool = False


@dataclass(slots=True)
class SaveGuard:
    """The worker's side of a failed load: when pages may be saved again.

    The scheduler learns of a failure with the step's output, and says in each later plan how many
    it has heard of. Engines that schedule ahead have one more step under way then; after that
    nothing computed on the failed blocks can be in a plan, whatever became of the message.
    """

    failures: int = 0
    last_step: int = -2

    def failed(self, step: int) -> None:
        """A load of this step failed; a second one in the same step is the same failure."""
        if step != self.last_step:
            self.failures += 1
            self.last_step = step

    def may_save(self, step: int, heard: int) -> bool:
        """May what step `step` computed be saved? `heard`: failures that its planner knew of."""
        return heard >= self.failures or step > self.last_step + 1


class RequestPlanner:
    """Follows the requests of one scheduler. Not thread-safe: it lives on the scheduler's thread.

    root: key that the first page's key is chained to (fingerprint of model and layout).
    block_tokens, page_tokens: tokens per block and per page; page_tokens is a multiple.
    chain: how a page key follows from its parent's key and its last block's hash.

    Raises ValueError when page_tokens is no multiple of block_tokens.
    """

    def __init__(self, root: bytes, block_tokens: int, page_tokens: int, chain: KeyChain) -> None:
        if page_tokens % block_tokens:
            raise ValueError(
                f"pages of {page_tokens} tokens do not fit vLLM blocks of {block_tokens} tokens: "
                f"set kvtier.page_tokens to a multiple of {block_tokens}"
            )
        self._root = root
        self._block_tokens = block_tokens
        self._blocks_per_page = page_tokens // block_tokens
        self._page_tokens = page_tokens
        self._chain = chain
        self._requests: dict[str, _Tracked] = {}

    @property
    def blocks_per_page(self) -> int:
        return self._blocks_per_page

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def track(
        self, request_id: str, block_hashes: Sequence[bytes], adapter: bytes | None = b""
    ) -> None:
        """Begin to follow a request. `block_hashes` is its live list: it grows with the output.

        adapter: digest of the content of its LoRA adapter (16 bytes or more), b"" without one; None
        = nobody can tell, so nothing is loaded or saved.
        """
        if request_id not in self._requests:
            self._requests[request_id] = _Tracked(block_hashes, adapter)

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def keys(self, request_id: str, tokens: int) -> list[bytes]:
        """Keys of the request's whole pages within its first `tokens` tokens."""
        request = self._requests[request_id]
        root = self._root_of(request)
        if root is None or request.left_out:
            return []
        pages = min(tokens // self._page_tokens, len(request.hashes) // self._blocks_per_page)
        while len(request.keys) < pages:
            last_block = (len(request.keys) + 1) * self._blocks_per_page - 1
            parent = request.keys[-1] if request.keys else root
            request.keys.append(self._chain(parent, bytes(request.hashes[last_block])))
        return request.keys[:pages]

    def _root_of(self, request: _Tracked) -> bytes | None:
        """The parent of the request's first page."""
        if not request.adapter:
            return None if request.adapter is None else self._root
        return self._chain(self._root, request.adapter)

    def loadable_keys(self, request_id: str, prompt_tokens: int) -> list[bytes]:
        """Keys that may be loaded for a prompt: at least one token is left to compute."""
        return self.keys(request_id, prompt_tokens - 1)

    def offer(self, request_id: str, hit_pages: int, computed_tokens: int) -> int:
        """Tokens that `hit_pages` cached pages add to `computed_tokens` of vLLM's own.

        vLLM may ask again, with another count, before it allocates; the last answer holds.
        """
        self._requests[request_id].load_first_block = computed_tokens // self._block_tokens
        return max(0, hit_pages * self._page_tokens - computed_tokens)

    def allocated(self, request_id: str, external_tokens: int) -> None:
        """vLLM has given blocks for `external_tokens` of the last offer; 0: nothing is loaded."""
        request = self._requests[request_id]
        end = request.load_first_block * self._block_tokens + external_tokens
        request.load_end_page = end // self._page_tokens if external_tokens else 0

    def blocks_replaced(self, request_id: str, block_ids: Sequence[int]) -> None:
        """The request is scheduled for the first time, or again after a preemption."""
        request = self._requests[request_id]
        request.block_ids = list(block_ids)
        request.left_out = False

    def blocks_appended(self, request_id: str, block_ids: Sequence[int]) -> None:
        self._requests[request_id].block_ids.extend(block_ids)

    def load_failed(self) -> None:
        """A load failed, so the worker saved nothing of a step or two: every request's pages are to
        be offered for saving again."""
        for request in self._requests.values():
            request.saved_pages = 0

    def reset(self, root: bytes) -> None:
        """Names given so far are void: the weights are others from here on, `root` is theirs.

        What a request holds in blocks now was computed before, so it is left out until it gets new
        ones.
        """
        self._root = root
        for request in self._requests.values():
            request.keys.clear()
            request.saved_pages = 0
            request.load_end_page = 0
            request.left_out = bool(request.block_ids)

    def step(self, request_id: str, tokens_after: int) -> tuple[LoadPages | None, SavePages | None]:
        """Pages to load before and to save after a step that ends with `tokens_after` computed."""
        request = self._requests[request_id]
        load = self._take_load(request_id, request)
        complete = min(
            tokens_after // self._page_tokens, len(request.block_ids) // self._blocks_per_page
        )
        if load is None and complete <= request.saved_pages:
            return None, None  # nearly every step of a decode
        keys = self.keys(request_id, complete * self._page_tokens)
        first = request.saved_pages
        if load is not None:  # what came from the cache need not go back there
            first = max(first, load.first_page + len(load.keys))
            request.saved_pages = first
        if len(keys) <= first:
            return load, None
        request.saved_pages = len(keys)
        parent = keys[first - 1] if first else self._root_of(request)
        assert parent is not None
        save = SavePages(
            request_id,
            parent,
            tuple(keys[first:]),
            first,
            self._blocks(request, first, len(keys)),
        )
        return load, save

    def _take_load(self, request_id: str, request: _Tracked) -> LoadPages | None:
        if request.load_end_page == 0:
            return None
        first_page = request.load_first_block // self._blocks_per_page
        load = LoadPages(
            request_id,
            tuple(request.keys[first_page : request.load_end_page]),
            first_page,
            self._blocks(request, first_page, request.load_end_page),
            request.load_first_block - first_page * self._blocks_per_page,
        )
        request.load_end_page = 0
        return load

    def _blocks(self, request: _Tracked, first_page: int, end_page: int) -> tuple[int, ...]:
        per_page = self._blocks_per_page
        return tuple(request.block_ids[first_page * per_page : end_page * per_page])
