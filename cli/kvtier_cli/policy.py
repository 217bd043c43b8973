"""``kvtier policy``: checks that need no cluster."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier_cli.output import FINDING, JsonOption, note, result, write_json

app = typer.Typer(help="Check policies offline.", no_args_is_help=True)


@app.callback()
def _policy() -> None:
    """Keeps ``policy`` a group although it has one command."""


@app.command()
def validate(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE", help="YAML or JSON files; '-' reads standard input."),
    ],
    json: JsonOption = None,
) -> None:
    """Check KVTierPolicy files by the rules that the API server and the operator use.

    Files may hold several documents; those of other API groups are passed over. Exit code 0: all
    valid; 1: there are problems, one a line; 2: wrong usage.
    """
    seen: dict[tuple[str, str], str] = {}
    found = [problem for file in files for problem in _check(file, seen)]
    for problem in found:
        where = f"{problem['file']}:{problem['line']}" if problem["line"] else problem["file"]
        path = f"{problem['path']}: " if problem["path"] else ""
        result(f"{where}: {path}{problem['message']}", json_target=json)
    if not found:
        result(f"{_plural(len(seen))} valid", json_target=json)
    write_json(
        {
            "valid": not found,
            "problems": [{k: p[k] for k in ("file", "path", "message")} for p in found],
        },
        json,
    )
    if found:
        raise typer.Exit(FINDING)


def _plural(count: int) -> str:
    return f"{count} object" if count == 1 else f"{count} objects"


def _problem(file: str, line: int, path: str, message: str) -> dict[str, Any]:
    return {"file": file, "line": line, "path": path, "message": message}


def _check(file: str, seen: dict[tuple[str, str], str]) -> Iterator[dict[str, Any]]:
    from kvtier_api import manifest
    from kvtier_api.validate import validate as problems_of

    try:
        documents = (
            manifest.parse(sys.stdin.buffer.read(manifest.MAX_FILE_BYTES + 1))
            if file == "-"
            else manifest.read(Path(file))
        )
    except manifest.ManifestError as error:
        yield _problem(file, error.line, "", error.message)
        return
    checked = 0
    for document in documents:
        for obj, base in _objects(document.obj):
            if _foreign(obj):
                note(f"{file}:{document.line(base)}: {obj['kind']} is not kvtier's; passed over")
                continue
            checked += 1
            problems = [
                (f"{base}.{problem.path}".strip("."), problem.message)
                for problem in problems_of(obj)
            ]
            for path, message in sorted(problems, key=lambda p: document.line(p[0])):
                yield _problem(file, document.line(path), path, message)
            if twin := _twin(file, obj, seen):
                path = f"{base}.metadata.name".strip(".")
                yield _problem(file, document.line(path), path, twin)
    if not checked:
        yield _problem(file, 0, "", "holds no KVTierPolicy")


def _objects(obj: Any, path: str = "") -> Iterator[tuple[Any, str]]:
    """The objects of a document: itself, or the items of a List, with their paths."""
    kind = obj.get("kind") if isinstance(obj, dict) else None
    if not isinstance(kind, str) or not kind.endswith("List") or not _has_items(obj):
        yield obj, path
        return
    # As kubectl: an item of a KVTierPolicyList may leave out what the list's kind says.
    says = {"apiVersion": obj.get("apiVersion"), "kind": kind.removesuffix("List")}
    for index, item in enumerate(obj["items"]):
        full = {**says, **item} if says["kind"] and isinstance(item, dict) else item
        yield from _objects(full, f"{path}.items[{index}]".strip("."))


def _has_items(obj: dict[str, Any]) -> bool:
    return isinstance(obj.get("items"), list)


def _foreign(obj: Any) -> bool:
    """Whether an object plainly belongs to another API, so that its file may hold it too."""
    from kvtier_api.validate import KINDS

    if not isinstance(obj, dict):
        return False
    version, kind = obj.get("apiVersion"), obj.get("kind")
    return (
        isinstance(version, str)
        and isinstance(kind, str)
        and kind not in KINDS
        and version.partition("/")[0] != "kvtier.io"
    )


def _twin(file: str, obj: Any, seen: dict[tuple[str, str], str]) -> str | None:
    metadata = obj.get("metadata") if isinstance(obj, dict) else None
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(name, str):
        return None
    key = (str(obj.get("kind")), name)
    if key in seen:
        return f"{name} is already defined in {seen[key]}: the later one would win; remove one"
    seen[key] = file
    return None
