"""What a replay says at its end: one JSON object, and the same as a table.

The keys of the JSON object are a contract (`docs/user/replay.md`); scripts read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvtier_agent.replay.accounting import Totals

TIERS = ("l0", "l1", "l2")
TIER_NAMES = {"l0": "L0 hbm", "l1": "L1 dram", "l2": "L2 nvme"}


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Seconds a page's move between two places took, at the median and the 99th percentile."""

    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a run.

    Attributes:
        requests, blocks, tokens: of the trace, all copies together.
        whole, second_half: see `accounting`.
        pages_written, bytes_written, evictions, dropped, latency: what the agent did during the
            run, by tier or by "from->to"; see `readings`.
        wrong_pages, wrong_bytes: loaded, checksum in order, and yet not what the key says.
        planted: faults made on purpose, by kind.
        quarantined: stored pages that the agent took out of use since their bytes were bad.
        failed_requests: requests to which the agent gave no answer.
        refused: pages that were not taken in, by reason.
        seconds: of wall clock.
        bad_lines: of the trace, how many and the first of them.
        settings: what the run was made with.
    """

    requests: int
    blocks: int
    tokens: int
    whole: Totals
    second_half: Totals
    pages_written: Mapping[str, int]
    bytes_written: Mapping[str, int]
    evictions: Mapping[str, int]
    dropped: Mapping[str, int]
    latency: Mapping[str, Quantiles]
    wrong_pages: int
    wrong_bytes: int
    planted: Mapping[str, int]
    quarantined: int
    failed_requests: int
    refused: Mapping[str, int]
    seconds: float
    bad_line_count: int = 0
    bad_lines: tuple[str, ...] = ()
    settings: Mapping[str, object] = field(default_factory=dict)

    def findings(self) -> list[str]:
        """What is not as promised, one sentence each; empty = all is well."""
        found = []
        wrong_on_purpose = self.planted.get("client_buffers", 0)
        bad_on_purpose = self.planted.get("stored_pages", 0)
        if self.wrong_pages != wrong_on_purpose:
            expected = f", {wrong_on_purpose} planted" if wrong_on_purpose else ""
            found.append(f"{self.wrong_pages} pages with wrong bytes{expected}")
        if self.quarantined != bad_on_purpose:
            found.append(f"{self.quarantined} pages quarantined, {bad_on_purpose} planted")
        if self.failed_requests:
            found.append(f"{self.failed_requests} requests got no answer from the agent")
        for kind in ("client_buffers", "stored_pages"):
            asked = self.planted.get(f"{kind}_asked", 0)
            if asked != self.planted.get(kind, 0):
                found.append(
                    f"only {self.planted.get(kind, 0)} of {asked} faults could be planted in "
                    f"{kind.replace('_', ' ')}: the run had too few such pages"
                )
        return found

    def as_json(self) -> dict[str, Any]:
        """The JSON object."""
        whole = self.whole
        return {
            "trace": {"requests": self.requests, "blocks": self.blocks, "tokens": self.tokens},
            "hits": {"l0": whole.l0, "l1": whole.l1, "l2": whole.l2, "miss": whole.miss},
            "block_hit_rate": whole.block_hit_rate,
            "token_hit_rate": whole.token_hit_rate,
            "second_half": {
                "block_hit_rate": self.second_half.block_hit_rate,
                "token_hit_rate": self.second_half.token_hit_rate,
            },
            "compute_saved": whole.compute_saved,
            "pages_written": dict(self.pages_written),
            "bytes_written": dict(self.bytes_written),
            "evictions": dict(self.evictions),
            "dropped": dict(self.dropped),
            "latency_seconds": {
                pair: {"p50": value.p50, "p99": value.p99} for pair, value in self.latency.items()
            },
            "pages_verified": whole.hits,
            "wrong_bytes": self.wrong_bytes,
            "wrong_pages": self.wrong_pages,
            "planted": dict(self.planted),
            "quarantined": self.quarantined,
            "failed_requests": self.failed_requests,
            "refused": dict(self.refused),
            "accesses_per_second": self.blocks / self.seconds if self.seconds else 0.0,
            "seconds": self.seconds,
            "bad_lines": {"count": self.bad_line_count, "first": list(self.bad_lines)},
            "settings": dict(self.settings),
        }

    def as_table(self) -> RenderableType:
        """The same for people."""
        tiers = Table(title="Where the blocks were", title_justify="left")
        tiers.add_column("")
        for name in ("hits", "share", "pages written", "bytes written", "evictions"):
            tiers.add_column(name, justify="right")
        counts = (self.whole.l0, self.whole.l1, self.whole.l2)
        for tier, hits in zip(TIERS, counts, strict=True):
            tiers.add_row(
                TIER_NAMES[tier],
                f"{hits:,}",
                _percent(hits / self.blocks if self.blocks else 0),
                f"{self.pages_written.get(tier, 0):,}",
                _size(self.bytes_written.get(tier, 0)),
                f"{self.evictions.get(tier, 0):,}",
            )
        missed = self.whole.miss
        tiers.add_row(
            "miss", f"{missed:,}", _percent(missed / self.blocks if self.blocks else 0), "", "", ""
        )
        facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for name, value in self._facts():
            facts.add_row(name, value)
        return Group(tiers, facts, self._verdict())

    def _facts(self) -> list[tuple[str, str]]:
        whole, half = self.whole, self.second_half
        rows = [
            ("requests", f"{self.requests:,} ({self.blocks:,} blocks, {self.tokens:,} tokens)"),
            (
                "hit rate",
                f"blocks {_percent(whole.block_hit_rate)}, tokens {_percent(whole.token_hit_rate)};"
                f" second half {_percent(half.block_hit_rate)},"
                f" {_percent(half.token_hit_rate)}",
            ),
            ("prefill compute saved", _percent(whole.compute_saved)),
        ]
        rows += [
            (f"{pair}", f"p50 {_time(value.p50)}, p99 {_time(value.p99)}")
            for pair, value in sorted(self.latency.items())
        ]
        speed = self.blocks / self.seconds if self.seconds else 0
        rows.append(("speed", f"{speed:,.0f} accesses/s ({self.seconds:.1f} s)"))
        refused = ", ".join(f"{count:,} {reason}" for reason, count in self.refused.items())
        if refused:
            rows.append(("not taken in", refused))
        if self.bad_line_count:
            rows.append(("bad lines", f"{self.bad_line_count:,}, first {self.bad_lines[0]}"))
        rows.append(
            (
                "verified",
                f"{whole.hits:,} pages byte for byte, {self.wrong_pages} wrong, "
                f"{self.quarantined} quarantined",
            )
        )
        return rows

    def _verdict(self) -> Text:
        findings = self.findings()
        if findings:
            return Text("finding: " + "; ".join(findings), style="bold red")
        planted = {
            kind.replace("_", " "): self.planted.get(kind, 0)
            for kind in ("client_buffers", "stored_pages")
        }
        if any(planted.values()):
            kinds = ", ".join(f"{count} {kind}" for kind, count in planted.items() if count)
            return Text(f"self-test passed: every planted fault was found ({kinds})", style="green")
        return Text("no wrong byte was served", style="green")


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _size(size: int) -> str:
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} us"
    return f"{1e3 * seconds:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"
