"""``python -m controlplane build | path | run``."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from controlplane.build import ToolError, to_stderr, tool_path
from controlplane.catalog import TOOLS
from controlplane.launcher import OPTIONAL, ControlPlane, ControlPlaneError


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except (ToolError, ControlPlaneError, ValueError) as error:
        print(f"controlplane: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m controlplane", description="A real Kubernetes control plane on one machine."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    build = commands.add_parser("build", help="find or build tools and print where they are")
    build.add_argument("tools", nargs="+", metavar="TOOL", help=", ".join([*TOOLS, "all"]))
    build.set_defaults(command=_build)

    path = commands.add_parser("path", help="print one tool's path; builds it if it has to be")
    path.add_argument("tool", metavar="TOOL", help=", ".join([*TOOLS, "kubectl", "kwok-stages"]))
    path.set_defaults(command=_path)

    run = commands.add_parser("run", help="start a control plane; it ends with this command")
    run.add_argument(
        "--with",
        dest="with_",
        default="",
        metavar="TOOL[,TOOL]",
        help=f"run these too: {','.join(OPTIONAL)} (default: none)",
    )
    run.add_argument("--audit", action="store_true", help="record every write in ROOT/audit.jsonl")
    run.add_argument(
        "--kubeconfig", type=Path, metavar="OUT", help="also write the admin kubeconfig to OUT"
    )
    run.add_argument(
        "--root", type=Path, help="keep its files here (default: a folder that is removed again)"
    )
    run.set_defaults(command=_run)
    return parser


def _build(options: argparse.Namespace) -> int:
    wanted = list(TOOLS) if "all" in options.tools else options.tools
    for name in wanted:
        print(f"{name} {tool_path(name)}", flush=True)
    return 0


def _path(options: argparse.Namespace) -> int:
    print(tool_path(options.tool))
    return 0


def _run(options: argparse.Namespace) -> int:
    # Like Ctrl-C: an orderly end, with status 130.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    root = options.root or Path(tempfile.mkdtemp(prefix="kvtier-controlplane-"))
    with_ = [name for name in options.with_.split(",") if name]
    try:
        with ControlPlane(root, with_, audit=options.audit) as plane:
            if options.kubeconfig:
                shutil.copyfile(plane.kubeconfig, options.kubeconfig)
                options.kubeconfig.chmod(0o600)
            to_stderr(f"API server at {plane.url}; Ctrl-C ends it")
            print(options.kubeconfig or plane.kubeconfig, flush=True)
            while True:
                time.sleep(0.5)
                plane.check()
    finally:
        if options.root is None:
            shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
