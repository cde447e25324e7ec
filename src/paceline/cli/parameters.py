"""From an options model to the parameters of a command, and from the words given to its values.

Types, defaults and help stay in `paceline.recipe`; a value is checked there alone, so that all
problems of a command are told together. Here is only what a shell needs: names and flags.
"""

import inspect
import json
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
import yaml
from pydantic.fields import FieldInfo

from paceline.errors import UsageError
from paceline.recipe import Options, parse_scalar, positional_options

_PLAIN_NAMES = {bool: "", str: "TEXT", int: "INT", float: "NUMBER", Any: "VALUE"}


@dataclass(frozen=True)
class Parameter:
    """One option of a command: where its value goes in the model, and how a shell says it.

    kind: an "enumeration" is a list of what holds no comma, so that one may stand between values.
    """

    path: tuple[str, ...]
    kind: Literal["flag", "list", "enumeration", "mapping", "value"]
    metavar: str
    help: str
    positional: bool

    @property
    def identifier(self) -> str:
        return "__".join(self.path)

    @property
    def option(self) -> str:
        return "--" + ".".join(self.path).replace("_", "-")

    def signature(self) -> inspect.Parameter:
        """As Typer reads it; nothing given is None, so that defaults stay with the model."""
        shape = {"flag": bool, "value": str}.get(self.kind, list[str])
        about: Any
        if self.positional:
            about = typer.Argument(metavar=self.metavar, help=self.help, show_default=False)
        elif self.kind == "flag":
            no = "--no-" + self.option.removeprefix("--")
            about = typer.Option(f"{self.option}/{no}", help=self.help, show_default=False)
        else:
            about = typer.Option(
                self.option, metavar=self.metavar, help=self.help, show_default=False
            )
        return inspect.Parameter(
            self.identifier,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[shape | None, about],
        )


def parameters_of(model: type[Options], path: tuple[str, ...] = ()) -> Iterator[Parameter]:
    """The parameters of a model; those of a group have dotted names (`--draft.num-layers`)."""
    for name, field in model.model_fields.items():
        kind = _bare(field.annotation)
        if isinstance(kind, type) and issubclass(kind, Options) and not _positional(model, name):
            yield from parameters_of(kind, (*path, name))
            continue
        yield Parameter(
            path=(*path, name),
            kind=_kind(kind),
            metavar=_metavar(kind, name, _positional(model, name)),
            help=_help(field, kind),
            positional=_positional(model, name),
        )


def values_of(parameters: list[Parameter], given: dict[str, Any]) -> dict[str, Any]:
    """Nested values for the model, of the options that were given. UsageError for a bad mapping."""
    values: dict[str, Any] = {}
    for parameter in parameters:
        value = given.get(parameter.identifier)
        if value is None:
            continue
        if parameter.kind == "mapping":
            value = _mapping(parameter.option, value)
        elif parameter.kind == "enumeration":
            value = [part.strip() for word in value for part in word.split(",")]
        *groups, leaf = parameter.path
        place = values
        for group in groups:
            place = place.setdefault(group, {})
        place[leaf] = value
    return values


def _positional(model: type[Options], name: str) -> bool:
    return name in positional_options(model)


def _bare(annotation: Any) -> Any:
    """The type without `| None`, constraints, and the Python-only half of `str | Recipe`."""
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return _bare(get_args(annotation)[0])
    return annotation


def _kind(kind: Any) -> Literal["flag", "list", "enumeration", "mapping", "value"]:
    if kind is bool:
        return "flag"
    if get_origin(kind) in (list, tuple):
        return "list" if _bare(get_args(kind)[0]) in (str, Any) else "enumeration"
    return "mapping" if get_origin(kind) is dict else "value"


def _metavar(kind: Any, name: str, positional: bool) -> str:
    if positional:
        return name.upper()
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return "|".join(map(str, arguments))
    if origin in (list, tuple):
        return _metavar(_bare(arguments[0]), name, False)
    if origin is dict:
        return "KEY=VALUE"
    return _PLAIN_NAMES[kind]


def _help(field: FieldInfo, kind: Any) -> str:
    several = {
        "list": ["repeat for several"],
        "enumeration": ["repeat for several, or join them by commas"],
        "mapping": ["repeat for several, or one JSON object"],
    }
    notes = several.get(_kind(kind), [])
    default = field.get_default(call_default_factory=True)
    if default not in (None, "", [], {}) and kind is not bool:
        shown = " ".join(map(str, default)) if isinstance(default, list | tuple) else default
        notes.append(f"default: {shown}")
    elif default is True:
        notes.append("default: yes")
    text = field.description or ""
    return f"{text} ({'; '.join(notes)})" if notes else text


def _mapping(option: str, words: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in words:
        if word.lstrip().startswith("{"):
            found |= _json_object(option, word)
            continue
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise UsageError(f"{option} {word!r}: write KEY=VALUE or one JSON object")
        try:
            found[key] = parse_scalar(text)
        except yaml.YAMLError as error:
            raise UsageError(f"{option} {word!r}: {text!r} is not a value: {error}") from error
    return found


def _json_object(option: str, word: str) -> dict[str, Any]:
    try:
        return json.loads(word)
    except json.JSONDecodeError as error:
        raise UsageError(f"{option} {word!r} is not JSON: {error}") from error
