"""The classic value model, as pure functions over arrays.

    T_load      = l * kv / B + w * ceil(l / P)
    V           = p * T_recompute - T_load
    VD          = V / size

l tokens to load, kv bytes per token, B bandwidth (bytes per second), w seconds per transfer, P
tokens per transfer unit, p the probability that the page is asked for again, size its bytes. VD is
in microseconds per MiB. A page is admitted to a tier when the tier has no threshold (0) or VD is at
least the threshold.

T_recompute is the time of a prefill of the page's tokens at its depth: a token at depth d costs
(1 + d / parity) / rate seconds, where `rate` is the engine's prefill speed at depth 0 and `parity`
the depth at which attention costs as much as all the rest.

    p = (weight * prior + reuses) / (weight + accesses)

with `accesses` the times the page was put or loaded and `reuses` the loads alone. A page that is
new has no history: it takes that of its nearest ancestor in the cache, else the prior. Worked
example: prior 30 %, weight 4. A newcomer without ancestor: p = 4*.3/4 = .30. A page put once and
loaded twice: p = (4*.3 + 2) / (4 + 3) = .457. Loaded 20 times: p = (1.2 + 20) / 25 = .848.

Worked example of VD: 512 tokens of 32 KiB each = 16 MiB, depth 0, 20,000 tokens/s:
T_recompute = 512/20000 * (1 + 256/30500) = 25.8 ms. From DRAM at 10 GB/s with 20 us per 1 MiB:
T_load = 16777216/10e9 + 16 * 20e-6 = 2.0 ms. V = .3 * 25.8 - 2.0 = 5.75 ms; VD = 5750/16 = 359.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MIB = 1 << 20

Floats = NDArray[np.float64]


def load_seconds(size_bytes: int, bandwidth: float, overhead: float, transfer_bytes: int) -> float:
    """T_load of one page. `bandwidth` bytes/s, `overhead` seconds per transfer."""
    transfers = -(-size_bytes // transfer_bytes)
    return size_bytes / bandwidth + overhead * transfers


def recompute_seconds(
    depth: Floats, tokens: int, tokens_per_second: float, parity_tokens: float
) -> Floats:
    """T_recompute of pages of `tokens` tokens that start at `depth` tokens."""
    middle = depth + tokens / 2
    return tokens / tokens_per_second * (1.0 + middle / parity_tokens)


def reuse_probability(hits: Floats, prior: float, prior_weight: float) -> Floats:
    """p of pages that were put once and loaded `hits` times. `prior` in 0..1."""
    return (prior_weight * prior + hits) / (prior_weight + 1.0 + hits)


def density(probability: Floats | float, recompute: Floats, load: float, size_bytes: int) -> Floats:
    """VD in microseconds per MiB; `recompute` and `load` in seconds."""
    return (probability * recompute - load) * 1e6 / (size_bytes / MIB)


def admitted(vd: Floats, threshold: int) -> NDArray[np.bool_]:
    """Which pages a tier with this threshold (microseconds per MiB, 0 = none) takes."""
    if threshold == 0:
        return np.ones(vd.shape, dtype=bool)
    taken: NDArray[np.bool_] = vd >= threshold
    return taken
