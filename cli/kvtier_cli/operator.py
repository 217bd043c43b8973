"""``kvtier operator``: the operator of a cluster. Every option comes from `OperatorSettings`."""

from __future__ import annotations

import typer

from kvtier_cli.options import settings_command
from kvtier_cli.output import UserError

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _settings() -> type:
    from kvtier_operator.settings import OperatorSettings

    return OperatorSettings


def _run(settings: object) -> int:
    # Loaded here: --help needs neither kopf nor kubernetes.
    from kvtier_operator.main import StartError, main

    try:
        return main(settings)  # type: ignore[arg-type]
    except StartError as e:
        raise UserError(str(e)) from None


settings_command(
    app,
    _settings(),
    _run,
    help="Run the operator: policies in, one KVTierNode per selected node out.",
    own_prefix=True,
)
