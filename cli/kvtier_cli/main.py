"""Entry point of ``kvtier``: a table of sub-commands, each loaded when it is called.

The group below knows names and one-line helps only; importing a sub-command's module, and with it
torch or kopf, waits until that sub-command runs. A package that is not there is answered by the
extra that brings it, and a ``UserError`` anywhere below is one line and exit code 1, a
``UsageError`` 2.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Final, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from kvtier_cli.output import FINDING, USAGE, UsageError, UserError, note


class Entry(NamedTuple):
    target: str
    help: str
    extra: str | None


#: Name -> where its typer app lives, what it does, and the extra whose packages it needs.
COMMANDS: Final[dict[str, Entry]] = {
    "policy": Entry("kvtier_cli.policy:app", "Check policies offline.", None),
    "agent": Entry("kvtier_cli.agent:app", "Run the cache agent of one node.", "agent"),
    "operator": Entry("kvtier_cli.operator:app", "Run the operator of a cluster.", "operator"),
    "replay": Entry("kvtier_cli.replay:app", "Drive an agent with a request trace.", "agent"),
    "bench": Entry("kvtier_cli.bench:app", "Measure speed on this machine.", "agent"),
    "inspect": Entry("kvtier_cli.inspect:app", "Look into a running agent's cache.", "agent"),
}


@contextmanager
def _mistakes(name: str) -> Iterator[None]:
    """Turn what a user can mend into one line and exit code 1, or 2 where the call is wrong."""
    try:
        yield
    except UserError as error:
        note(f"error: {error}")
        raise typer.Exit(USAGE if isinstance(error, UsageError) else FINDING) from None
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        entry = COMMANDS.get(name)
        if entry is None or entry.extra is None or package.startswith("kvtier"):
            raise
        note(
            f"error: kvtier {name} needs the package {package}, which is not installed: "
            f"pip install 'CHECKOUT[{entry.extra}]' (CHECKOUT: the folder of kvtier's source)"
        )
        raise typer.Exit(FINDING) from None


def load(name: str) -> Any:
    """The command behind a name, imported now."""
    module, _, attribute = COMMANDS[name].target.partition(":")
    command = get_command(getattr(importlib.import_module(module), attribute))
    command.name = name
    return command


class LazyGroup(TyperGroup):
    """Shows the table; imports a sub-command only to run it."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, entry in COMMANDS.items():
            self.commands[name] = TyperCommand(name=name, help=entry.help, callback=None)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name in COMMANDS:
            with _mistakes(name):
                command = load(name)
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        name = next(iter(getattr(ctx, "_protected_args", ())), "")
        with _mistakes(name):
            return super().invoke(ctx)


app = typer.Typer(
    name="kvtier",
    cls=LazyGroup,
    help="A tiered KV cache for LLM serving: GPU memory, DRAM and NVMe under one policy.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def installed_version() -> str:
    try:
        return version("kvtier")
    except PackageNotFoundError:
        return "unknown (not installed)"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvtier {installed_version()}")
        raise typer.Exit


@app.callback()
def _main(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Say the version."),
    ] = False,
) -> None:
    pass


if __name__ == "__main__":
    app()
