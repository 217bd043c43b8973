"""What every command shares: the ``--json`` contract, user errors, and where text goes.

``--json PATH`` writes one JSON object to a file, ``--json -`` writes it to standard output and
nothing else goes there. Progress and logs go to standard error, always.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, TextIO

import typer

#: Exit codes of every command: done; a finding or a user's mistake (one line); wrong usage.
DONE: Final = 0
FINDING: Final = 1
USAGE: Final = 2

JsonOption = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="PATH|-",
        help="Write the result as one JSON object to PATH, or to standard output for '-'.",
    ),
]


class UserError(Exception):
    """Something the user can mend. Shown as one line; the process ends with exit code 1.

    The text says what is wrong and what to write or do instead.
    """

    def __str__(self) -> str:
        return " ".join(super().__str__().split())


class UsageError(UserError):
    """A call that is wrong in itself, whatever the files it names hold: exit code 2."""


def note(text: str) -> None:
    """A line for people, on standard error."""
    _say(text, sys.stderr)


def result(text: str, *, json_target: str | None = None) -> None:
    """A line of the result, on standard output; on standard error where that belongs to JSON."""
    _say(text, sys.stderr if json_target == "-" else sys.stdout)


def _say(text: str, stream: TextIO) -> None:
    """A line with what the stream's encoding lacks written as \\uXXXX: names in files are free."""
    encoding = stream.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


def check_json_target(target: str | None) -> None:
    """Before work that takes a while: can ``write_json`` write there? Raises ``UserError``."""
    if target in (None, "-"):
        return
    path = Path(str(target))
    if path.is_dir():
        raise UserError(f"--json {target}: is a folder; name a file in it")
    if not path.parent.is_dir():
        raise UserError(f"--json {target}: there is no folder {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"--json {target}: you may not write there; name another file")


def write_json(obj: Mapping[str, Any], target: str | None) -> None:
    """Obey ``--json``: nothing for None, standard output for ``-``, else a file.

    NaN and infinity are no JSON and raise ``ValueError``. Raises ``UserError`` when the file
    cannot be written.
    """
    if target is None:
        return
    text = json.dumps(obj, indent=2, allow_nan=False)
    if target == "-":
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
        return
    try:
        Path(target).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--json {target}: cannot write: {error.strerror}") from None
