"""What one sees: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from demo.promises import Promise
from demo.traffic import TierUse
from demo.watching import Frame, NodeFrame

_BAR = 8
_LINE_EVERY_SECONDS = 5.0


class Screen(Protocol):
    """Takes lines and frames."""

    def say(self, text: str) -> None: ...

    def show(self, frame: Frame) -> None: ...

    def live(self) -> contextlib.AbstractContextManager[None]: ...


class LiveScreen:
    """A table that changes in place, lines scroll above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None

    def say(self, text: str) -> None:
        self._console.print(Text.assemble(("• ", "bold cyan"), text))

    def show(self, frame: Frame) -> None:
        if self._live is not None:
            self._live.update(table(frame))

    @contextlib.contextmanager
    def live(self) -> Iterator[None]:
        with Live(console=self._console, refresh_per_second=4) as live:
            self._live = live
            try:
                yield
            finally:
                self._live = None


class PlainScreen:
    """Lines with the seconds since the start; a frame every few seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._last = -_LINE_EVERY_SECONDS

    def say(self, text: str) -> None:
        seconds = time.monotonic() - self._began
        self._console.print(f"{seconds:6.1f} s  {text}", soft_wrap=True)

    def show(self, frame: Frame) -> None:
        if frame.seconds - self._last < _LINE_EVERY_SECONDS:
            return
        self._last = frame.seconds
        for node in frame.nodes:
            self.say(line(node))

    @contextlib.contextmanager
    def live(self) -> Iterator[None]:
        yield


def line(node: NodeFrame) -> str:
    """One node in one line."""
    recent = node.recent
    blocks = recent.blocks or 1
    use = "  ".join(
        f"{name} {_use(tier)}" for name, tier in zip(("L0", "L1", "L2"), node.tiers, strict=True)
    )
    return (
        f"{node.node}  revision {node.revision[:10] or '-'}  {use}  "
        f"{recent.requests / node.recent_seconds:5.1f} requests/s  hits "
        f"{100 * recent.hits / blocks:3.0f} % (L0 {100 * recent.l0 / blocks:.0f}, "
        f"L1 {100 * recent.l1 / blocks:.0f}, L2 {100 * recent.l2 / blocks:.0f})  "
        f"{node.total.hits:,} pages verified, {node.total.wrong_bytes} wrong bytes"
    )


def table(frame: Frame) -> RenderableType:
    """All nodes."""
    grid = Table(title=f"kvtier demo, {frame.seconds:.0f} s of traffic", title_justify="left")
    for name in ("node", "revision", "ready"):
        grid.add_column(name)
    for name in ("L0 hbm", "L1 dram", "L2 nvme"):
        grid.add_column(name)
    for name in ("req/s", "hits", "L0/L1/L2 %", "verified", "wrong"):
        grid.add_column(name, justify="right")
    for node in frame.nodes:
        recent = node.recent
        blocks = recent.blocks or 1
        shares = "/".join(f"{100 * n / blocks:.0f}" for n in (recent.l0, recent.l1, recent.l2))
        grid.add_row(
            node.node,
            node.revision[:10] or "-",
            Text("yes", "green") if node.ready else Text(node.reason or "no", "yellow"),
            *(_bar(tier) for tier in node.tiers),
            f"{recent.requests / node.recent_seconds:.1f}",
            f"{100 * recent.hits / blocks:.0f} %",
            shares,
            f"{node.total.hits:,}",
            Text(str(node.total.wrong_bytes), "bold red" if node.total.wrong_bytes else "green"),
        )
    return grid


def summary(promises: list[Promise], facts: list[tuple[str, str]]) -> RenderableType:
    """The end: what was promised, and how it went."""
    grid = Table(title="What was promised", title_justify="left")
    grid.add_column("promise")
    grid.add_column("measured")
    grid.add_column("")
    for promise in promises:
        verdict = Text("holds", "green") if promise.holds else Text("BROKEN", "bold red")
        grid.add_row(promise.what, promise.measured, verdict)
    more = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in facts:
        more.add_row(name, value)
    return Group(grid, more)


def _use(tier: TierUse) -> str:
    return f"{tier.used / (1 << 20):.0f}/{tier.capacity / (1 << 20):.0f} MiB"


def _bar(tier: TierUse) -> Text:
    full = round(_BAR * min(1.0, tier.share))
    return Text.assemble(("█" * full, "cyan"), ("░" * (_BAR - full), "dim"), f" {_use(tier)}")
