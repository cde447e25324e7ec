"""A console that keeps what it was given."""

import io
from collections.abc import Callable

from rich.console import Console


def text_console(terminal: bool = False) -> tuple[Console, Callable[[], str]]:
    stream = io.StringIO()
    colours = "truecolor" if terminal else None
    console = Console(
        file=stream, width=120, force_terminal=terminal, color_system=colours, highlight=False
    )
    return console, stream.getvalue
