"""What a verb's file in this folder says of it: its options, its function, how to show a result."""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console

from paceline.cli.parameters import parameters_of, values_of
from paceline.recipe import Options, build

Show = Callable[[dict[str, Any], Console], None]
Problems = Callable[[dict[str, Any]], list[str]]


def no_problems(_: dict[str, Any]) -> list[str]:
    return []


@dataclass(frozen=True)
class Command:
    """A verb. `show` prints a result for people; `problems` names what in a finished result is less
    than full success (it makes the exit code 1). on_ranks: torchrun may start it as several
    processes, of which one speaks."""

    name: str
    model: type[Options]
    module: str
    show: Show
    problems: Problems = no_problems
    on_ranks: bool = False

    def run(self, values: dict[str, Any]) -> dict[str, Any]:
        """Check the values and do the work. The verb's module is loaded here, and not before: torch
        takes seconds, and wrong options need no torch."""
        options = build(self.model, values, where=f"paceline {self.name}")
        return importlib.import_module(self.module).VERB[1](options)


@dataclass(frozen=True)
class Request:
    """One parsed command line: what to do, with which values, and how to tell."""

    command: Command
    given: dict[str, Any]
    as_json: bool
    debug: bool

    def run(self) -> dict[str, Any]:
        parameters = list(parameters_of(self.command.model))
        return self.command.run(values_of(parameters, self.given))


def add_command(app: typer.Typer, command: Command, receive: Callable[[Request], None]) -> None:
    """Let `app` parse this command and hand the request to `receive`."""

    def callback(json: bool, debug: bool, **given: Any) -> None:
        receive(Request(command, given, json, debug))

    common = {
        "json": "Print exactly one JSON object on stdout, and nothing else there.",
        "debug": "Show the traceback of an unexpected error.",
    }
    parameters = [p.signature() for p in parameters_of(command.model)] + [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=False,
            annotation=Annotated[bool, typer.Option(f"--{name}", help=text, show_default=False)],
        )
        for name, text in common.items()
    ]
    # Typer reads a function's signature; this one is made of the options model.
    callback.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    callback.__annotations__ = {p.name: p.annotation for p in parameters}
    text = (command.model.__doc__ or "").partition(": ")[2]
    app.command(command.name, help=text[:1].upper() + text[1:])(callback)
