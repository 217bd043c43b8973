"""`kvtier agent`: the cache of one node. Every option comes from `AgentSettings`."""

from __future__ import annotations

import typer
from kvtier_agent.settings import AgentSettings

from kvtier_cli.options import settings_command
from kvtier_cli.output import UserError

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _run(settings: AgentSettings) -> int:
    from kvtier_agent.node.main import StartError, run  # torch and its friends: seconds

    try:
        return run(settings)
    except StartError as e:
        raise UserError(str(e)) from None


settings_command(
    app,
    AgentSettings,
    _run,
    help="Run the cache of one node: alone under a policy file, or under Kubernetes.",
    own_prefix=True,
)
