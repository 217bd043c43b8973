"""`python -m image build|test`: see `make image` and `make image-test`."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence

from image.base import base_image
from image.build import TARGETS, Built, build
from image.engine import ImageError, find_engine, say


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="image", description=__doc__)
    parser.add_argument("what", choices=("build", "test"))
    parser.add_argument(
        "--target",
        choices=TARGETS,
        action="append",
        help="build only this one; repeat it (default: both)",
    )
    parser.add_argument("--base", default="", help="base image (default: python:3.11-slim, or a "
                        "Debian made here where that cannot be pulled)")  # fmt: skip
    parser.add_argument("--tag", default="dev", help="tag of both images (default: dev)")
    return parser.parse_args(arguments)


def table(built: Sequence[Built]) -> str:
    rows = [f"{b.reference:<36} {b.size / 1e6:>8.0f} MB  {b.seconds:>6.1f} s" for b in built]
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = time.monotonic()
    try:
        engine = find_engine()
        base = base_image(engine, options.base)
        say(f"image: {engine.kind}, base {base}")
        targets = options.target or TARGETS
        if options.what == "test" and set(targets) != set(TARGETS):
            raise ImageError("test needs both images; leave --target out")
        built = [build(engine, base, target, tag=options.tag) for target in targets]
        print(table(built), flush=True)
        if options.what == "test":
            from image.check import check

            check(engine, options.tag)
            print(f"image-test: passed in {time.monotonic() - began:.0f} s")
    except ImageError as error:
        say(f"image: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
