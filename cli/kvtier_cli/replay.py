"""`kvtier replay`: a request trace through a real agent, every byte verified."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier_cli.output import FINDING, JsonOption, UserError, check_json_target, note, write_json

if TYPE_CHECKING:
    from kvtier_agent.replay.accounting import Totals
    from kvtier_agent.replay.driver import Plan
    from kvtier_agent.replay.report import Report
    from kvtier_agent.replay.trace import Trace

app = typer.Typer(add_completion=False)

AGENT = [sys.executable, "-m", "kvtier_cli.main", "agent"]
INTERRUPTED = 130
LEAST_SPEED = 1e-6
MOST_SPEED = 1e9


@app.command(
    help="Drive an agent with a request trace in Mooncake's JSONL form, plain or .gz, with real "
    "bytes through the real tiers, and verify every page that comes back. Without --socket an "
    "agent is started for the run and removed after it."
)
def replay(
    trace: Annotated[Path, typer.Argument(help="The trace.", show_default=False)],
    policy: Annotated[
        Path | None,
        typer.Option(
            help="File with the KVTierPolicy the started agent runs under. "
            "[default: a packaged one with three small tiers]",
            show_default=False,
        ),
    ] = None,
    tier: Annotated[
        str | None,
        typer.Option(
            metavar="l0=N,l1=N,l2=N",
            help="Pages per tier, in place of the policy's sizes; l0=0 or l2=0 turns it off.",
            show_default=False,
        ),
    ] = None,
    page_bytes: Annotated[
        int, typer.Option(min=4096, max=64 << 20, help="Bytes of a page, a multiple of 4096.")
    ] = 16384,
    block_tokens: Annotated[
        int, typer.Option(min=16, max=8192, help="Tokens that one hash id stands for.")
    ] = 512,
    speed: Annotated[
        str,
        typer.Option(
            metavar="X|max", help="Trace seconds per second, or max: no waiting between requests."
        ),
    ] = "max",
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Only the first requests, this many.", show_default=False),
    ] = None,
    copies: Annotated[
        int, typer.Option(min=1, max=10_000, help="Repeat the trace, each time with other keys.")
    ] = 1,
    partial: Annotated[
        bool,
        typer.Option("--partial/--no-partial", help="Keep last blocks that are not full."),
    ] = True,
    volume: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=DIR",
            help="Where the started agent puts a volume that the policy names; repeat it for "
            "each. [default: a temporary folder]",
            show_default=False,
        ),
    ] = None,
    socket: Annotated[
        Path | None,
        typer.Option(help="Socket of a running agent to use instead.", show_default=False),
    ] = None,
    flops_parity_tokens: Annotated[
        int,
        typer.Option(
            min=1,
            max=10_000_000,
            help="Depth in tokens at which attention costs as much as the rest of prefill; weighs "
            "compute_saved.",
        ),
    ] = 30_500,
    max_bad_lines: Annotated[
        int,
        typer.Option(min=0, max=10_000_000, help="Bad lines skipped before giving up."),
    ] = 100,
    self_test_corrupt: Annotated[
        int,
        typer.Option(
            min=0,
            max=1_000_000,
            help="Self-test: overwrite this many loaded buffers; each must be reported wrong.",
        ),
    ] = 0,
    corrupt_tier: Annotated[
        int,
        typer.Option(
            min=0,
            max=100_000,
            help="Self-test: flip bytes in this many stored pages; none may be served, each must "
            "be quarantined.",
        ),
    ] = 0,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=(1 << 48) - 1,
            help="Of keys and contents; the same seed finds the pages of an earlier run in a "
            "running agent. [default: a new one]",
            show_default=False,
        ),
    ] = None,
    json_target: JsonOption = None,
) -> None:
    from kvtier_agent.replay.driver import Plan, new_seed
    from kvtier_agent.replay.errors import ReplayError
    from kvtier_agent.replay.trace import read_trace

    if page_bytes % 4096 or page_bytes % (2 * block_tokens):
        raise UserError(
            f"--page-bytes {page_bytes}: write a multiple of 4096 and of twice --block-tokens"
        )
    check_json_target(json_target)
    signal.signal(signal.SIGTERM, _terminated)
    try:
        volumes = _volumes(volume or [])
        plan = Plan(
            page_bytes=page_bytes,
            speed=_speed(speed),
            copies=copies,
            parity_tokens=flops_parity_tokens,
            corrupt_client=self_test_corrupt,
            corrupt_tier=corrupt_tier,
            volumes=tuple(volumes.items()),
            seed=new_seed() if seed is None else seed,
        )
        requests = read_trace(
            trace,
            block_tokens=block_tokens,
            max_bad_lines=max_bad_lines,
            limit=limit,
            partial=partial,
        )
        for bad in requests.bad_lines[:5]:
            note(f"{trace}: {bad}")
        if requests.bad_line_count > 5:
            note(f"{trace}: {requests.bad_line_count - 5} more bad lines")
        report = _run(requests, plan, policy, tier, socket)
    except ReplayError as error:
        raise UserError(str(error)) from None
    except KeyboardInterrupt:
        note("interrupted; everything that was started is gone")
        raise typer.Exit(INTERRUPTED) from None
    _show(report)
    write_json(report.as_json(), json_target)
    if report.findings():
        raise typer.Exit(FINDING)


def _run(
    trace: Trace, plan: Plan, policy: Path | None, tier: str | None, socket: Path | None
) -> Report:
    from dataclasses import replace

    from kvtier_agent.replay import driver
    from kvtier_agent.replay.own_agent import OwnAgent
    from kvtier_agent.replay.policyfile import load_policy, parse_tiers, with_tiers

    if socket is not None:
        if policy is not None or tier is not None:
            raise UserError(
                "--socket uses an agent that has its policy already: leave out --policy and --tier"
            )
        with _progress(trace, plan, lambda: "") as watcher:
            return driver.replay(trace, socket, plan, watcher)
    tiers = parse_tiers(tier) if tier is not None else {}
    manifest = with_tiers(load_policy(policy), tiers, plan.page_bytes)
    shape = ["--l0", "engine"] if tiers.get("l0") == 0 else []
    with OwnAgent(
        AGENT, manifest, volumes=dict(plan.volumes), seed=plan.seed, arguments=shape
    ) as agent:
        plan = replace(plan, volumes=tuple(agent.volumes.items()))
        with _progress(trace, plan, agent.alive) as watcher:
            report = driver.replay(trace, agent.socket, plan, watcher)
        given, clamped = agent.tiers()
    if clamped:
        note(f"the agent gave less than was asked for: {clamped}")
    sizes = manifest["spec"]["tiers"]
    asked = {name: str(tier["size"]) for name, tier in sizes.items() if "size" in tier}
    if shape:
        asked.pop("hbm", None)
    settings = {"tiers_asked": asked, "tiers_given_bytes": given, "clamped": clamped}
    return replace(report, settings={**report.settings, **settings})


class _Bar:
    """A progress bar on standard error; ten lines where that is no terminal."""

    def __init__(self, bar: Any, task: Any, alive: Callable[[], str]) -> None:
        self._bar = bar
        self._task = task
        self.alive = alive
        self._pending = self._said = 0

    def advance(self, blocks: int, totals: Callable[[], Totals]) -> None:
        self._pending += blocks
        if self._bar.disable:
            self._say(totals)
            return
        if self._pending < 2000:
            return
        rate = totals().block_hit_rate
        self._bar.update(self._task, advance=self._pending, rate=f"{100 * rate:.1f} %")
        self._pending = 0

    def _say(self, totals: Callable[[], Totals]) -> None:
        """Without a terminal: a line for every tenth of the trace."""
        whole = self._bar.tasks[0].total or 0
        if self._pending >= self._said + whole / 10:
            self._said = self._pending
            rate, done = totals().block_hit_rate, self._pending / whole
            note(f"replay: {done:.0%} of {whole:.0f} blocks, hits {rate:.1%}")


@contextlib.contextmanager
def _progress(trace: Trace, plan: Plan, alive: Callable[[], str]) -> Iterator[_Bar]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    with Progress(
        TextColumn("replay"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("blocks, hits {task.fields[rate]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    ) as bar:
        task = bar.add_task("replay", total=trace.blocks * plan.copies, rate="-")
        yield _Bar(bar, task, alive)


def _show(report: Report) -> None:
    from rich.console import Console

    Console(stderr=True, highlight=False).print(report.as_table())


def _speed(text: str) -> float | None:
    from kvtier_agent.replay.errors import ReplayError

    if text == "max":
        return None
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not LEAST_SPEED <= speed <= MOST_SPEED:
        raise ReplayError(
            f"--speed {text}: write max, or how many trace seconds pass in one, from"
            f" {LEAST_SPEED:g} to {MOST_SPEED:g}"
        )
    return speed


def _volumes(given: list[str]) -> dict[str, Path]:
    from kvtier_agent.replay.errors import ReplayError

    volumes: dict[str, Path] = {}
    for text in given:
        name, sign, folder = text.partition("=")
        if not name or not sign or not folder or name in volumes:
            raise ReplayError(f"--volume {text}: write NAME=DIR once for each, as in data0=/mnt/a")
        volumes[name] = Path(folder).absolute()
    return volumes


def _terminated(number: int, frame: object) -> None:
    raise KeyboardInterrupt
