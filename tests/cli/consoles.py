"""A console that keeps what it was given."""

import io
from collections.abc import Callable

from rich.console import Console

from paceline.cli.output import PlainConsole


def text_console(terminal: bool = False) -> tuple[Console, Callable[[], str]]:
    stream = io.StringIO()
    colours = "truecolor" if terminal else None
    console = PlainConsole(file=stream, width=120, force_terminal=terminal, color_system=colours)
    return console, stream.getvalue
