"""From a trace's hash ids to page keys, as an engine would make them.

A hash id stands for the tokens of one block; the page's key is chained over the blocks in front
of it (`kvtier_agent.cache.identity`), so that two requests share a page only as long as all
their ids up to it are equal. A copy of the trace (`--copies`) has a root of its own: same
traffic, nothing in common. A last block that is not full has the same key rule; its id differs
from that of the full block that it grows into.

Hashing costs more than a microsecond a page, and a trace asks for the same page many times. So
the chain is kept as a tree: (node of the parent, hash id) -> node, and keys are made once a node.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier_agent.cache.identity import KEY_BYTES, KeyArray, child_key_from_digest, root_key
from kvtier_agent.replay.trace import Ids

_ROOT = -1


class ChainKeys:
    """Keys of one copy of a trace.

    Args:
        fingerprint: of the geometry that the pages have.
        salt: what tells this run and copy from others.
    """

    def __init__(self, fingerprint: bytes, salt: bytes) -> None:
        self.root = root_key(fingerprint, salt)
        self._nodes: dict[tuple[int, int], int] = {}
        self._keys: npt.NDArray[np.uint8] = np.empty((4096, KEY_BYTES), dtype=np.uint8)

    def __len__(self) -> int:
        """Different pages so far."""
        return len(self._nodes)

    def of(self, ids: Ids) -> KeyArray:
        """Keys of a prompt's blocks, (n, 16) uint8 in prefix order."""
        nodes = self._nodes
        chain: list[int] = []
        parent = _ROOT
        for number in ids.tolist():
            step = (parent, number)
            node = nodes.get(step)
            if node is None:
                node = self._add(step)
            chain.append(node)
            parent = node
        return self._keys[chain]

    def known(self) -> KeyArray:
        """All keys made so far, (n, 16) uint8, a parent before its children."""
        return self._keys[: len(self._nodes)].copy()

    def _add(self, step: tuple[int, int]) -> int:
        parent, number = step
        node = len(self._nodes)
        if node == len(self._keys):
            self._keys = np.concatenate([self._keys, np.empty_like(self._keys)])
        parent_key = self.root if parent == _ROOT else self._keys[parent].tobytes()
        key = child_key_from_digest(parent_key, number.to_bytes(16, "little"))
        self._keys[node] = np.frombuffer(key, dtype=np.uint8)
        self._nodes[step] = node
        return node
