"""`kvtier agent`: the cache of one node. Every option comes from `AgentSettings`."""

from __future__ import annotations

import typer

from kvtier_cli.options import settings_command

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _settings() -> type:
    from kvtier_agent.settings import AgentSettings

    return AgentSettings


def _run(settings: object) -> int:
    from kvtier_agent.node.main import run

    return run(settings)  # type: ignore[arg-type]


settings_command(
    app,
    _settings(),
    _run,
    help="Run the cache of one node: alone under a policy file, or under Kubernetes.",
)
