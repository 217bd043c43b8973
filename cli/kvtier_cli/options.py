"""A command's options out of a settings class, so that each knob is described once.

Every field of the (pydantic-settings) class becomes one option ``--field-name``. Its help is the
field's description with unit, bounds, default and environment variable; its text is checked by the
class itself, so option and environment refuse the same things with the same words.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Any

import annotated_types
import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

__all__ = ["describe", "read_settings", "settings_command", "sentence"]

BOUNDS = (("ge", "at least"), ("gt", "more than"), ("le", "at most"), ("lt", "less than"))


def settings_command(
    app: typer.Typer,
    settings: type[BaseSettings],
    run: Callable[[Any], int],
    *,
    help: str,  # noqa: A002 - typer's own word
) -> None:
    """Adds one command to ``app`` whose options are the fields of ``settings``. ``run`` gets the
    validated settings and returns the exit status. A mistake is one line and exit status 1."""

    def command(**given: Any) -> None:
        said = {k: v for k, v in given.items() if v is not None and v != []}
        try:
            ready = read_settings(settings, said)
        except ValueError as e:
            typer.echo(f"error: {e}", err=True)
            raise typer.Exit(1) from None
        raise typer.Exit(run(ready))

    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [_parameter(name, field, settings) for name, field in settings.model_fields.items()]
    )
    command.__doc__ = help
    app.command(help=help)(command)


def read_settings(settings: type[BaseSettings], given: dict[str, Any]) -> Any:
    """The settings with ``given`` laid over the environment. Raises ValueError, one line."""
    try:
        return settings(**given)
    except ValidationError as e:
        raise ValueError("; ".join(sentence(error) for error in e.errors())) from None


def sentence(error: Any) -> str:
    """One pydantic error as a sentence that names the option."""
    message = str(error["msg"]).removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if not error["loc"]:
        return message
    name = str(error["loc"][0])
    name = name.rpartition("KVTIER_AGENT_")[2].lower() if name.isupper() else name
    return f"--{name.replace('_', '-')}: {message}"


def describe(name: str, field: FieldInfo, settings: type[BaseSettings]) -> str:
    """The help text of one field."""
    facts = [_unit(field), *_bounds(field), _default(field), _environment(name, settings)]
    return f"{field.description}. [{'; '.join(f for f in facts if f)}]"


def _parameter(name: str, field: FieldInfo, settings: type[BaseSettings]) -> inspect.Parameter:
    option = f"--{name.replace('_', '-')}"
    text = describe(name, field, settings)
    group = _extra(field).get("group") or None
    kind: Any
    if field.annotation is bool:
        kind = Annotated[bool | None, _option(f"{option}/--no-{option[2:]}", text, group)]
    elif typing.get_origin(field.annotation) in (tuple, list):
        kind = Annotated[list[str] | None, _option(option, text, group, _metavar(field))]
    else:
        kind = Annotated[str | None, _option(option, text, group, _metavar(field))]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind
    )


def _option(
    declaration: str, text: str, group: str | None, metavar: str | None = None
) -> typer.models.OptionInfo:
    made: typer.models.OptionInfo = typer.Option(
        declaration, help=text, metavar=metavar, show_default=False, rich_help_panel=group
    )
    return made


def _metavar(field: FieldInfo) -> str:
    choices = _choices(field.annotation)
    if choices:
        return "|".join(choices)
    kinds = {int: "N", float: "X"}
    unit = _extra(field).get("unit")
    if unit == "quantity":
        return "SIZE"
    return kinds.get(typing.cast(Any, field.annotation), "VALUE")


def _choices(annotation: Any) -> list[str]:
    if typing.get_origin(annotation) is typing.Literal:
        return [str(a) for a in typing.get_args(annotation)]
    return []


def _unit(field: FieldInfo) -> str:
    unit = _extra(field).get("unit", "")
    return f"unit {unit}" if unit else ""


def _bounds(field: FieldInfo) -> list[str]:
    found = []
    for bound in field.metadata:
        for attribute, word in BOUNDS:
            value = getattr(bound, attribute, None)
            if value is not None and isinstance(bound, annotated_types.BaseMetadata):
                found.append(f"{word} {_shown(value, field)}")
    return found


def _default(field: FieldInfo) -> str:
    shown = _extra(field).get("shown")
    if shown:
        return f"default {shown}"
    value = field.default
    return "" if value is None else f"default {_shown(value, field)}"


def _shown(value: Any, field: FieldInfo) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if _extra(field).get("unit") == "quantity":
        return _quantity(int(value))
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _quantity(size: int) -> str:
    for unit, factor in (("Pi", 1 << 50), ("Ti", 1 << 40), ("Gi", 1 << 30), ("Mi", 1 << 20)):
        if size >= factor and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def _environment(name: str, settings: type[BaseSettings]) -> str:
    prefix = settings.model_config.get("env_prefix", "")
    return f"env {prefix}{name.upper()}" if prefix else ""


def _extra(field: FieldInfo) -> dict[str, Any]:
    extra = field.json_schema_extra
    return typing.cast(dict[str, Any], extra) if isinstance(extra, dict) else {}
