"""`kvtier bench`: speed against a baseline, in one run. Every option comes from the settings."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator

import typer
from kvtier_agent.bench import settings as knobs

from kvtier_cli.options import settings_command
from kvtier_cli.output import DONE, UserError, check_json_target, note, result, write_json

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measure kvtier on this machine, each figure against a baseline in the same run. "
    "A ratio above 1 means that kvtier is better. An agent is started for the run and removed "
    "after it.",
)

AGENT = [sys.executable, "-m", "kvtier_cli.main", "agent"]
INTERRUPTED = 130

HELP: dict[str, tuple[type[knobs.BenchSettings], str]] = {
    "memory": (
        knobs.MemorySettings,
        "Pages into DRAM and out of it by another process, against memcpy.",
    ),
    "lookup": (
        knobs.LookupSettings,
        "Round trip of one lookup of many keys, against a plain socket in front of a dict.",
    ),
    "l2": (
        knobs.L2Settings,
        "Pages to a drive and back through the agent, with O_DIRECT, against fio.",
    ),
    "recovery": (
        knobs.RecoverySettings,
        "Time until a killed agent with a full volume answers lookups, and heap of a page.",
    ),
    "endtoend": (
        knobs.EndToEndSettings,
        "Whole prompts stored and retrieved, against numpy copies and a dict in one process.",
    ),
}


def _run(settings: knobs.BenchSettings, json_target: str | None) -> int:
    check_json_target(json_target)
    from kvtier_agent.bench import runner
    from kvtier_agent.bench.errors import BenchError

    try:
        with _interruptible():
            report = runner.run(AGENT, settings, note)
    except BenchError as error:
        raise UserError(str(error)) from None
    except KeyboardInterrupt:
        note("interrupted; everything that was started is gone")
        return INTERRUPTED
    result(report.as_text(), json_target=json_target)
    write_json(report.as_json(), json_target)
    return DONE


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does: in good order."""

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


for _name, (_settings, _help) in HELP.items():
    settings_command(app, _settings, _run, help=_help, name=_name, json_option=True)
