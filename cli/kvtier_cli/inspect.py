"""``kvtier inspect``: look into a running agent's cache, by its page tables, without asking it.

The tables are files in the agent's run folder, one per trust domain; they are opened read-only, so
this neither slows the agent nor needs it to answer.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvtier_cli.output import DONE, FINDING, JsonOption, UserError, note, write_json

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def inspect(
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--run-dir", help="The agent's run folder. [default: the agent's own default]"
        ),
    ] = None,
    domain: Annotated[
        str | None, typer.Option("--domain", help="Only this trust domain. [default: all]")
    ] = None,
    top: Annotated[
        int, typer.Option("--top", min=0, max=1000, help="How many of the longest prefixes.")
    ] = 10,
    json_target: JsonOption = None,
) -> None:
    """Show pages per tier and state, pins, ages and the largest prefixes of a running agent.

    JSON: `run_dir`, and per trust domain in `domains`: `pages`, `bytes`, `pinned_pages` (by
    leases and by clients), `pins`, `client_pinned_pages`, `client_pinned_bytes`, `marked_pages`
    (deleted or bad, not free yet), `partial_pages`, `exempt_pages`, `states{..}`,
    `tiers{hbm,dram,nvme}{pages, bytes, pinned_pages, idle_seconds{p50,p90,p99,max}}`,
    `top_prefixes[]{key, pages, bytes, hits, longest_tokens, idle_seconds}`,
    `suspect_segments{count, numbers[]}`: those of NVMe that held a bad page and get nothing new
    until they were emptied and tested, `boot`, `restart{taken_over, dropped{reason: pages},
    cold}`: what the agent found of the one before it, and why it started cold, "" otherwise.
    `running`: whether the agent lives; without it the figures are what one that was killed has left
    (an orderly stop leaves nothing to look at), and the exit code is 1.
    """
    from kvtier_agent.settings import default_run_dir

    folder = run_dir if run_dir is not None else default_run_dir()
    found = _tables(folder, domain)
    running = _running(folder, found)
    result: dict[str, Any] = {
        "run_dir": str(folder),
        "running": running,
        "domains": {name: _read(path, top) for name, path in found.items()},
    }
    write_json(result, json_target)
    if json_target is None:
        _show(result)
    if not running:
        note(f"no agent runs on {folder}; this is what one that was killed has left")
        raise typer.Exit(FINDING)
    raise typer.Exit(DONE)


def _running(folder: Path, domains: dict[str, Path]) -> bool:
    """Does anybody listen where the agent of these domains does?"""
    from kvtier_agent.server.connection import is_live

    return any(is_live(folder / f"{name}.sock") for name in domains)


def _tables(folder: Path, domain: str | None) -> dict[str, Path]:
    from kvtier_agent.server.rundir import table_path

    try:
        found = {
            path.stem: path
            for path in sorted(folder.iterdir())
            if path == table_path(folder, path.stem)
        }
    except OSError as error:
        raise UserError(
            f"{folder}: {error.strerror}; name the agent's run folder with --run-dir"
        ) from None
    if domain is not None:
        if domain not in found:
            known = ", ".join(found) or "none"
            raise UserError(f"no trust domain {domain} in {folder}; there is: {known}")
        return {domain: found[domain]}
    if not found:
        raise UserError(
            f"no page table in {folder}: no engine has connected to the agent yet, it was stopped, "
            "or it uses another folder; name it with --run-dir"
        )
    return found


def _read(path: Path, top: int) -> dict[str, Any]:
    from kvtier_agent.cache.table_reader import TableReader
    from kvtier_agent.cache.table_view import TableError
    from kvtier_agent.server.inspection import summarise

    try:
        reader = TableReader(path)
        figures = summarise(reader.scan(), time.monotonic(), top)
    except TableError as error:
        raise UserError(str(error)) from None
    return {
        **figures,
        "suspect_segments": reader.suspects,
        "boot": reader.boot_id.hex(),
        "restart": reader.restart,
    }


def _restart(found: dict[str, Any]) -> str:
    from kvtier_agent.cache.warm import Restart

    return Restart(**found).say()


def _show(result: dict[str, Any]) -> None:
    console = Console()
    for name, domain in result["domains"].items():
        kept = domain["client_pinned_pages"]
        tiers = Table(
            title=f"{name}: {domain['pages']} pages, {domain['pinned_pages']} pinned"
            + (f" ({kept} by clients)" if kept else "")
        )
        for column in ("tier", "pages", "MiB", "pinned", "idle p50 s", "idle max s"):
            tiers.add_column(column, justify="left" if column == "tier" else "right")
        for tier, figures in domain["tiers"].items():
            idle = figures["idle_seconds"] or {}
            tiers.add_row(
                tier,
                str(figures["pages"]),
                f"{figures['bytes'] / (1 << 20):.1f}",
                str(figures["pinned_pages"]),
                f"{idle['p50']:.1f}" if idle else "-",
                f"{idle['max']:.1f}" if idle else "-",
            )
        console.print(tiers)
        if found := _restart(domain["restart"]):
            console.print(found, markup=False)
        if suspects := domain["suspect_segments"]["count"]:
            numbers = ", ".join(map(str, domain["suspect_segments"]["numbers"]))
            console.print(
                f"suspect segments of NVMe: {suspects}, among them {numbers}; nothing new is"
                " written there until they were emptied and tested",
                markup=False,
            )
        states = [f"{state} {n}" for state, n in domain["states"].items() if n]
        console.print("states: " + (", ".join(states) or "none"))
        if domain["top_prefixes"]:
            prefixes = Table(title="largest prefixes")
            for column in ("first page", "pages", "MiB", "hits", "tokens deep", "idle s"):
                prefixes.add_column(column, justify="left" if column == "first page" else "right")
            for prefix in domain["top_prefixes"]:
                prefixes.add_row(
                    prefix["key"][:12],
                    str(prefix["pages"]),
                    f"{prefix['bytes'] / (1 << 20):.1f}",
                    str(prefix["hits"]),
                    str(prefix["longest_tokens"]),
                    f"{prefix['idle_seconds']:.1f}",
                )
            console.print(prefixes)
