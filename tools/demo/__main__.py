"""`python -m demo`: see the package's text."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from controlplane import ControlPlaneError, ToolError
from kvtier_agent.replay.errors import ReplayError
from kvtier_agent.replay.guardian import GuardianError
from rich.console import Console

from demo.screen import LiveScreen, PlainScreen, summary
from demo.stage import DemoError
from demo.story import Script, play


def main(arguments: list[str] | None = None) -> int:
    """0 = all promises hold, 1 = one does not or something is wrong, 130 = interrupted."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console(highlight=False)
    live = console.is_terminal and not options.once
    screen = LiveScreen(console) if live else PlainScreen(console)
    script = Script(options.seconds, options.trace, options.out, options.pace, options.seed)
    try:
        ending = play(script, screen)
    except KeyboardInterrupt:
        console.print("interrupted; everything that was started is gone")
        return 130
    except (DemoError, ReplayError, GuardianError, ControlPlaneError, ToolError) as error:
        Console(stderr=True, highlight=False).print(f"demo: {error}", soft_wrap=True, markup=False)
        return 1
    console.print(summary(ending.promises, ending.facts))
    return 0 if all(promise.holds for promise in ending.promises) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make demo",
        description="Three nodes, one policy, live traffic: kvtier on this machine, with a real "
        "Kubernetes API server.",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="plain lines instead of a live table",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        default=Path(os.environ["TRACE"]) if os.environ.get("TRACE") else None,
        help="take the traffic from this request trace (default: generated sessions)",
    )
    parser.add_argument(
        "--seconds", type=_seconds, default=45.0, help="of traffic, 10 to 3600 (default: 45)"
    )
    parser.add_argument(
        "--pace", type=float, default=8.0, help="trace seconds per second (default: 8)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the generated traffic (default: 1)")
    parser.add_argument(
        "--out", type=Path, default=Path("demo-out"), help="folder of the plot (default: demo-out)"
    )
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 10 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text}: write seconds from 10 to 3600")
    return value


if __name__ == "__main__":
    sys.exit(main())
