"""The reference pages, written from the code: ``python -m reference [--check]``.

``docs/reference/policy.md`` and ``node.md`` come from the models, ``reasons.md`` from the enum of
condition reasons, ``commands.md`` from the options of every sub-command; the settings in the
chart's schema from their classes (``chart_settings``). Nothing in them is typed by hand, so nothing
can be out of date without a test noticing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chart_settings
from kvtier_api import KVTierNode, KVTierPolicy, Reason, crd
from kvtier_api.model import ApiModel
from kvtier_api.rules import SIZE

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"
NOTE = "<!-- Written by tools/reference.py; do not edit. -->\n"
Node = dict[str, Any]


def pages() -> dict[str, str]:
    return {
        "policy.md": kind_page(
            KVTierPolicy,
            "Written by people and GitOps; short name `ktp`. `examples/policies/reference.yaml` "
            "has every field in one file. Sections of `spec` other than `nodeSelector`, "
            "`priority` and `rollout` make the *revision*: a change there is rolled out, and two "
            "specs that differ only in spelling or in defaults written out are one revision.\n\n"
            "A *size* is a number with a unit such as `512Mi`, `16Gi`, `1.5Ti` or `500G` "
            "(Ki, Mi, Gi, Ti, Pi are powers of 1024; k, M, G, T, P powers of 1000), or a plain "
            "number of bytes.",
        ),
        "node.md": kind_page(
            KVTierNode,
            "One per node, named after it; short name `ktn`. `spec` is written by the operator, "
            "`status` by that node's agent. Not for editing by hand.",
        ),
        "reasons.md": reasons_page(),
        "commands.md": commands_page(),
    }


# ---------------------------------------------------------------- kinds


def kind_page(kind: type[ApiModel], about: str) -> str:
    schema = crd.schema(kind)
    lines = [NOTE, f"# {kind.__name__}\n", f"{schema['description']} {about}\n"]
    if rules := list(rule_lines(schema)):
        lines += [*rules, ""]
    for name in ("spec", "status"):
        lines += [f"## {name}\n", f"{schema['properties'][name]['description']}\n"]
        lines += list(section_lines(schema["properties"][name], name, 3))
    return "\n".join(lines).rstrip() + "\n"


def section_lines(node: Node, path: str, level: int) -> Iterator[str]:
    """A table of the fields of a section, its rules, then the sections below it."""
    required = node.get("required", [])
    yield "| field | type | what it is |"
    yield "|---|---|---|"
    for name, child in node["properties"].items():
        mark = " *(required)*" if name in required else ""
        text = child.get("description", "").replace("|", "\\|")
        yield f"| `{name}`{mark} | {type_of(child)} | {text} |"
    yield ""
    if rules := list(rule_lines(node)):
        yield from [*rules, ""]
    for name, child in node["properties"].items():
        inner = child.get("items", child)
        if "properties" not in inner:
            for sentence in sentences(child):
                yield f"`{name}`: {sentence}.\n"
            continue
        here = f"{path}.{name}" + ("[]" if "items" in child else "")
        if here == "spec.stable.spec":
            yield f"{'#' * level} {here}\n"
            yield "The behaviour sections of a policy's spec, see [KVTierPolicy](policy.md).\n"
            continue
        yield f"{'#' * level} {here}\n"
        yield from section_lines(inner, here, min(level + 1, 6))


def rule_lines(node: Node) -> Iterator[str]:
    rules = [rule["message"] for rule in node.get("x-kubernetes-validations", [])]
    if rules:
        yield "Refused, with this sentence, unless obeyed:\n"
        yield from (f"- {message}" for message in rules)


def sentences(node: Node) -> Iterator[str]:
    """Sentences about the value itself, its items or the entries of a map."""
    for part in (node, node.get("items", {}), node.get("additionalProperties", {})):
        for rule in part.get("x-kubernetes-validations", []):
            if rule["message"] != SIZE.message:  # said once, above
                yield rule["message"]


def type_of(node: Node) -> str:
    if "enum" in node:
        return " or ".join(f"`{value}`" for value in node["enum"])
    if node.get("x-kubernetes-int-or-string"):
        return "size"
    kind = node.get("type")
    if kind == "array":
        most = node["maxItems"]
        return f"list of {type_of(node['items'])}, at most {most}"
    if kind == "object":
        return "section" if "properties" in node else f"map, at most {node['maxProperties']}"
    return {"string": "text", "integer": "whole number", "boolean": "true or false"}[str(kind)]


# ---------------------------------------------------------------- reasons


def reasons_page() -> str:
    lines = [
        NOTE,
        "# Condition reasons\n",
        "What a condition's `reason` means, and what to do. The same words stand in the status of "
        "KVTierPolicy and KVTierNode.\n",
        "| reason | message | what to do |",
        "|---|---|---|",
    ]
    for reason in Reason:
        message, runbook = (text.replace("|", "\\|") for text in reason.about)
        lines.append(f"| `{reason.value}` | {message} | {runbook} |")
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- commands


def commands_page() -> str:
    from kvtier_cli.main import COMMANDS, load

    lines = [
        NOTE,
        "# Commands\n",
        "`--json -` writes one JSON object to standard output and nothing else there; progress "
        "and logs go to standard error. Exit code 0: done; 1: a finding or a user's mistake, in "
        "one line; 2: wrong usage.\n",
    ]
    for name, entry in COMMANDS.items():
        lines += command_lines(load(name), f"kvtier {name}", entry.help)
    return "\n".join(lines).rstrip() + "\n"


def command_lines(command: Any, path: str, fallback: str) -> Iterator[str]:
    yield f"## {path}\n"
    text = (command.help or fallback).strip().replace("\f", "")
    yield "\n".join(line.strip() for line in text.splitlines()) + "\n"
    for name, child in getattr(command, "commands", {}).items():
        yield from command_lines(child, f"{path} {name}", "")
    if getattr(command, "commands", None):
        return
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    if arguments:
        yield "| argument | what it is |"
        yield "|---|---|"
        for argument in arguments:
            yield f"| `{argument.metavar or argument.name.upper()}` | {cell(argument.help)} |"
        yield ""
    rows = [option for option in options if "--help" not in option.opts and not option.hidden]
    if rows:
        yield "| option | what it does | default |"
        yield "|---|---|---|"
        for option in rows:
            names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
            yield f"| {names} | {cell(option.help)} | {default_of(option)} |"
        yield ""


def cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def default_of(option: Any) -> str:
    value = option.default
    if option.required:
        return "required"
    if (
        value is None
        or value in ((), [], "")
        or callable(value)
        or "Sentinel" in type(value).__name__
    ):
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{cell(str(value))}`"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m reference", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether pages are current")
    check = parser.parse_args().check
    stale = []
    for name, text in pages().items():
        path = FOLDER / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    if not chart_settings.is_current():
        stale.append(str(chart_settings.PATH))
        if not check:
            chart_settings.write()
    if check and stale:
        print(
            f"out of date: {', '.join(stale)}; run PYTHONPATH=tools python -m reference",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
