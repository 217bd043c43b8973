"""The story as a picture: hit rate by layer and use of the tiers over time, a column a node."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

from demo.stage import NODES
from demo.watching import Frame

_LAYERS = (("L0 hbm", "l0", "#1b7837"), ("L1 dram", "l1", "#4393c3"), ("L2 nvme", "l2", "#f4a582"))
_MIB = 1 << 20


def draw(frames: Sequence[Frame], marks: Sequence[tuple[float, str]], path: Path) -> None:
    """Write a PNG; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    seconds = [frame.seconds for frame in frames]
    figure, axes = plt.subplots(
        2, len(NODES), figsize=(5 * len(NODES), 7), sharex=True, sharey="row", squeeze=False
    )
    for column, name in enumerate(NODES):
        nodes = [next(n for n in frame.nodes if n.node == name) for frame in frames]
        rates, use = axes[0][column], axes[1][column]
        rates.stackplot(
            seconds,
            [
                [100 * getattr(n.recent, field) / max(1, n.recent.blocks) for n in nodes]
                for _, field, _ in _LAYERS
            ],
            labels=[label for label, _, _ in _LAYERS],
            colors=[color for _, _, color in _LAYERS],
        )
        for tier, (label, _, color) in enumerate(_LAYERS):
            use.plot(seconds, [n.tiers[tier].used / _MIB for n in nodes], color=color, label=label)
            use.plot(
                seconds,
                [n.tiers[tier].capacity / _MIB for n in nodes],
                color=color,
                linestyle=":",
                linewidth=1,
            )
        for moment, what in marks:
            for axis in (rates, use):
                axis.axvline(moment, color="#762a83", linewidth=1)
            rates.annotate(what, (moment, 101), fontsize=8, color="#762a83", annotation_clip=False)
        rates.set_title(name, pad=18)
        rates.set_ylim(0, 100)
        use.set_yscale("log")
        use.set_xlabel("seconds of traffic")
    axes[0][0].set_ylabel("blocks found, % of blocks asked\n(the rest is recomputed)")
    axes[1][0].set_ylabel("bytes in the tier, MiB (dotted: its size)")
    axes[0][0].legend(loc="lower right", fontsize=8)
    axes[1][-1].legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
