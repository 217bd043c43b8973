"""A command's options out of a settings class, so that each knob is described once.

Every field of the (pydantic-settings) class becomes one option ``--field-name``. Its help is the
field's description with unit, bounds, default and environment variable; its text is checked by the
class itself, so option and environment refuse the same things with the same words.
"""

from __future__ import annotations

import inspect
import os
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import annotated_types
import typer
from pydantic import AliasChoices, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from kvtier_cli.environment import strays
from kvtier_cli.output import JsonOption, UsageError, UserError

__all__ = ["describe", "read_settings", "sentence", "settings_command"]

BOUNDS = (("ge", "at least"), ("gt", "more than"), ("le", "at most"), ("lt", "less than"))


def settings_command(
    app: typer.Typer,
    settings: type[BaseSettings],
    run: Callable[..., int],
    *,
    help: str,
    name: str | None = None,
    json_option: bool = False,
    own_prefix: bool = False,
) -> None:
    """Adds one command to ``app`` whose options are the fields of ``settings``. ``run`` gets the
    validated settings and returns the exit status. A mistake is one line and exit status 1, in
    an option's value 2.

    ``own_prefix``: no other command's variables begin with the prefix of this one's, so that an
    unknown one is a mistake. ``json_option``: the command has ``--json`` too, and ``run`` gets its
    target as ``json_target``.
    """

    def command(**given: Any) -> None:
        extra = {"json_target": given.pop("json_target")} if json_option else {}
        said = {k: v for k, v in given.items() if v is not None and v != []}
        prefix = settings.model_config.get("env_prefix", "")
        if own_prefix and (stray := list(strays(os.environ, prefix, settings.model_fields))):
            raise UserError("; ".join(stray))
        try:
            ready = read_settings(settings, said)
        except ValueError as e:
            raise UsageError(str(e)) from None
        raise typer.Exit(run(ready, **extra))

    parameters = [_parameter(field, of, settings) for field, of in settings.model_fields.items()]
    if json_option:
        parameters.append(
            inspect.Parameter(
                "json_target", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=JsonOption
            )
        )
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__doc__ = help
    app.command(name, help=help)(command)


def read_settings(settings: type[BaseSettings], given: dict[str, Any]) -> Any:
    """The settings with ``given`` laid over the environment. Raises ValueError, one line."""
    try:
        return settings(**given)
    except ValidationError as e:
        raise ValueError("; ".join(sentence(error, settings) for error in e.errors())) from None


def sentence(error: Any, settings: type[BaseSettings]) -> str:
    """One pydantic error as a sentence that names the option."""
    message = _what_to_write(error)
    if not error["loc"]:
        return message
    return f"{_option_name(str(error['loc'][0]), settings)}: {message}"


def _option_name(said: str, settings: type[BaseSettings]) -> str:
    """The option of a field; pydantic names a field by the environment variable it came from."""
    for name, field in settings.model_fields.items():
        alias = field.validation_alias
        if isinstance(alias, AliasChoices) and said in alias.choices:
            said = name
    return f"--{said.replace('_', '-')}"


def _what_to_write(error: Any) -> str:
    limits = error.get("ctx") or {}
    got = f", not {error.get('input')!r}"
    match error["type"]:
        case "greater_than_equal":
            return f"write at least {limits['ge']:g}{got}"
        case "less_than_equal":
            return f"write at most {limits['le']:g}{got}"
        case "literal_error":
            return f"write {limits['expected']}{got}".replace("'", "")
        case "float_parsing" | "int_parsing" | "float_type" | "int_type":
            return f"write a number{got}"
        case "too_long":
            return f"give at most {limits['max_length']}"
        case "too_short":
            return f"give at least {limits['min_length']}"
        case "string_pattern_mismatch":
            return f"write a name that matches {limits['pattern']}{got}"
        case "extra_forbidden":
            return "no such setting"
        case _:
            text = str(error["msg"]).removeprefix("Value error, ")
            return text[:1].lower() + text[1:]


def describe(name: str, field: FieldInfo, settings: type[BaseSettings]) -> str:
    """The help text of one field."""
    facts = [_unit(field), *_bounds(field), _default(field), _environment(name, settings)]
    return f"{field.description}. ({'; '.join(f for f in facts if f)})"


def _parameter(name: str, field: FieldInfo, settings: type[BaseSettings]) -> inspect.Parameter:
    option = f"--{name.replace('_', '-')}"
    text = describe(name, field, settings)
    group = _extra(field).get("group") or None
    kind: Any
    if field.annotation is bool:
        names = f"{option}/--no-{option[2:]}" if field.default else option
        kind = Annotated[bool | None, _option(names, text, group)]
    elif typing.get_origin(field.annotation) in (tuple, list):
        kind = Annotated[list[str] | None, _option(option, text, group, _metavar(field))]
    else:
        kind = Annotated[str | None, _option(option, text, group, _metavar(field))]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


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
    kinds: dict[Any, str] = {int: "N", float: "X", Path: "PATH", Path | None: "PATH"}
    if _extra(field).get("unit") == "quantity":
        return "SIZE"
    return _extra(field).get("metavar") or kinds.get(field.annotation, "TEXT")


def _choices(annotation: Any) -> list[str]:
    if typing.get_origin(annotation) is typing.Literal:
        return [str(a) for a in typing.get_args(annotation)]
    return []


def _unit(field: FieldInfo) -> str:
    unit = _extra(field).get("unit", "")
    return f"unit: {unit}" if unit else ""


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
        return f"default: {shown}"
    value = field.default
    return "default: none" if value is None else f"default: {_shown(value, field)}"


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
    return f"env: {prefix}{name.upper()}" if prefix else ""


def _extra(field: FieldInfo) -> dict[str, Any]:
    extra = field.json_schema_extra
    return typing.cast(dict[str, Any], extra) if isinstance(extra, dict) else {}
