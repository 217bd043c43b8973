"""Manifests: YAML text to plain objects, strictly, with the line of everything.

Stricter than a bare YAML loader where leniency hides mistakes, and closer to what kubectl sends:

- a key that stands twice in one mapping is an error (a loader would silently keep the last);
- a ``%YAML`` or ``%TAG`` line is refused, since kubectl takes it for a document of its own;
- JSON objects may follow each other, and tabs may stand where kubectl takes them;
- ``12:30`` and ``2026-11-30`` stay text, as in kubectl's reading of YAML;
- anchors work, but a document that expands beyond ``MAX_NODES`` values, or contains itself, is
  refused before it is built.

This module and the CRD generator are the only ones of the package that need PyYAML.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from kvtier_api import json_stream

MAX_FILE_BYTES: Final = 16 << 20
"""A file may hold many objects; each has the bound of ``validate.MAX_BYTES``."""
MAX_NODES: Final = 200_000
MAX_DEPTH: Final = 64
_OPEN_ALREADY: Final = ("/dev/fd/", "/proc/self/fd/")
"""Pipes that the shell has opened: ``<(helm template ...)``."""
_STEP: Final = re.compile(r"\[(\d+)\]|([^.\[]+)")


class ManifestError(ValueError):
    """Text that is no manifest; ``line`` counts from 1, 0 where no line is to blame."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(f"line {line}: {message}" if line else message)
        self.line = line
        self.message = message


@dataclass(frozen=True)
class Document:
    """One YAML or JSON document: the object, and the tree that knows its lines."""

    obj: Any
    node: yaml.Node
    lines_before: int = 0

    def line(self, path: str) -> int:
        """Line of the deepest part of ``path`` (``spec.tiers.nvme.volumes[0]``) that exists."""
        node, line = self.node, self.node.start_mark.line
        rest = path
        while rest:
            found = _child(node, rest)
            if found is None:
                break
            line, node, rest = found
        return self.lines_before + line + 1


def read(path: Path) -> list[Document]:
    """All documents of a file; empty ones are left out. Raises ``ManifestError``."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise ManifestError(0, "is a folder: name the files in it")
        if not stat.S_ISREG(mode) and not _is_open_already(path):
            raise ManifestError(0, "is no regular file: write '-' to read standard input")
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ManifestError(0, f"cannot be read: {error.strerror}") from None
    return parse(data)


def _is_open_already(path: Path) -> bool:
    return str(path) == "/dev/stdin" or str(path).startswith(_OPEN_ALREADY)


def one(data: bytes) -> Any:
    """The object of a text that holds exactly one. Raises ``ManifestError``."""
    documents = parse(data)
    if len(documents) != 1:
        raise ManifestError(0, f"holds {len(documents)} documents: write exactly one KVTierPolicy")
    return documents[0].obj


def parse(data: bytes) -> list[Document]:
    """All documents of a text; empty ones are left out. Raises ``ManifestError``."""
    if len(data) > MAX_FILE_BYTES:
        raise ManifestError(0, f"is larger than {MAX_FILE_BYTES} bytes: write several files")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ManifestError(line, "is not UTF-8 text") from None
    try:
        return list(_documents(text))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = error.problem or error.context or "cannot be understood"
        raise ManifestError(mark.line + 1 if mark else 0, f"is not YAML: {reason}") from None
    except yaml.YAMLError as error:
        position = getattr(error, "position", 0)
        line = text[:position].count("\n") + 1
        raise ManifestError(line, "is not YAML: a control character is in the text") from None


def _documents(text: str) -> Iterator[Document]:
    objects = json_stream.pieces(text)
    if objects is None:
        yield from _loaded(text)
        return
    line = position = 0
    for obj, start, end in objects:
        line, position = line + text.count("\n", position, start), start
        # YAML's reading of a JSON text has the lines and finds keys that stand twice; JSON's has
        # the values (an escaped pair of surrogates is one character).
        try:
            for document in _loaded(text[start:end]):
                yield Document(obj, document.node, line)
        except ManifestError as error:
            raise ManifestError(error.line and line + error.line, error.message) from None


def _loaded(text: str) -> Iterator[Document]:
    loader = _Loader(text)
    try:
        while loader.check_node():
            loader.nodes = 0
            node = loader.get_node()
            if node is None:
                continue
            _measure(node, {}, 0)
            obj = _constructed(loader, node)
            if obj is not None:
                yield Document(obj, node)
    finally:
        loader.dispose()


def _constructed(loader: _Loader, node: yaml.Node) -> Any:
    try:
        return loader.construct_document(node)
    except ManifestError:
        raise
    except ValueError as error:  # a number of thousands of digits
        line = node.start_mark.line + 1
        raise ManifestError(line, f"holds a value that cannot be read: {error}") from None


class _Loader(yaml.SafeLoader):
    """SafeLoader with unique keys, text keys, and no times or sexagesimal numbers."""

    depth = 0
    nodes = 0

    def process_directives(self) -> Any:
        if self.check_token(yaml.DirectiveToken):
            token = self.peek_token()  # type: ignore[no-untyped-call]
            line = token.start_mark.line + 1
            raise ManifestError(line, "kubectl takes no %YAML or %TAG line: remove it")
        return super().process_directives()  # type: ignore[no-untyped-call]

    def scan_to_next_token(self) -> None:
        super().scan_to_next_token()
        # As kubectl's reader: a tab separates, but never stands where indentation counts.
        while self.peek() == "\t" and (self.flow_level or not self.allow_simple_key):
            self.forward()
            super().scan_to_next_token()

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.depth += 1
        self.nodes += 1
        if self.nodes > MAX_NODES:
            line = self.get_mark().line + 1
            raise ManifestError(line, f"has more than {MAX_NODES} values: write several files")
        if self.depth > MAX_DEPTH:
            line = self.get_mark().line + 1
            raise ManifestError(line, f"is nested deeper than {MAX_DEPTH} levels")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag == "tag:yaml.org,2002:null":
                line = key.start_mark.line + 1
                raise ManifestError(line, "a key must be plain text: put it into quotes")
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise ManifestError(
                        key.start_mark.line + 1,
                        f"the key {key.value} stands twice in one section: remove one",
                    )
                seen.add(key.value)
            elif not isinstance(key, yaml.ScalarNode):
                raise ManifestError(key.start_mark.line + 1, "a key must be plain text")
        self.flatten_mapping(node)
        return {
            _as_text(self.construct_object(key)): self.construct_object(value, deep=deep)
            for key, value in node.value
        }


def _as_text(key: object) -> str:
    """A key as JSON has it: kubectl turns ``1`` and ``true`` into text as well."""
    if isinstance(key, bool):
        return "true" if key else "false"
    return str(key)


_NUMBER_TAGS = {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"}
_TIME_TAG = "tag:yaml.org,2002:timestamp"
_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern) for tag, pattern in resolvers if tag != _TIME_TAG and tag not in _NUMBER_TAGS
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# kubectl reads y and n as yes and no, too.
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^[yYnN]$"), list("yYnN"))
_Loader.bool_values = {**yaml.SafeLoader.bool_values, "y": True, "n": False}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"^[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0o?[0-7_]*|[1-9][0-9_]*)$"),
    list("-+0123456789"),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)


def _measure(node: yaml.Node, known: dict[int, tuple[int, int]], depth: int) -> tuple[int, int]:
    """Values and characters that a node expands to, anchors followed; refuses what is too large
    or endless."""
    if depth > MAX_DEPTH:
        raise ManifestError(
            node.start_mark.line + 1, f"is nested deeper than {MAX_DEPTH} levels, or in itself"
        )
    if isinstance(node, yaml.ScalarNode):
        return 1, len(node.value)
    if id(node) in known:
        return known[id(node)]
    children: Iterator[yaml.Node] = (
        iter(node.value)
        if isinstance(node, yaml.SequenceNode)
        else (part for pair in node.value for part in pair)
    )
    values, characters = 1, 0
    for child in children:
        more = _measure(child, known, depth + 1)
        values, characters = values + more[0], characters + more[1]
        if values > MAX_NODES or characters > MAX_FILE_BYTES:
            most = f"{MAX_NODES} values" if values > MAX_NODES else f"{MAX_FILE_BYTES} bytes"
            raise ManifestError(node.start_mark.line + 1, f"expands to more than {most}")
    known[id(node)] = values, characters
    return values, characters


def _child(node: yaml.Node, path: str) -> tuple[int, yaml.Node, str] | None:
    """One step down: line of the key, the node there, and what is left of the path.

    The longest key that fits wins, since label keys contain dots.
    """
    if isinstance(node, yaml.SequenceNode):
        match = _STEP.match(path)
        if match is None or match[1] is None or int(match[1]) >= len(node.value):
            return None
        item = node.value[int(match[1])]
        return item.start_mark.line, item, path[match.end() :].lstrip(".")
    if isinstance(node, yaml.MappingNode):
        fits = [
            (key.value, key, value)
            for key, value in node.value
            if path == key.value or path.startswith((f"{key.value}.", f"{key.value}["))
        ]
        if fits:
            name, key, value = max(fits, key=lambda fit: len(fit[0]))
            return key.start_mark.line, value, path[len(name) :].lstrip(".")
    return None
