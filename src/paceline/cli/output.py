"""Where words go: results to stdout, everything else to stderr; tables and numbers for people."""

import itertools
import json
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Self

from rich import box
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table

# What rich takes where there is no terminal to ask; its own 80 columns cut tables.
_WIDTH_WITHOUT_TERMINAL = 110
_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARKLINE_WIDTH = 60


def is_first_rank() -> bool:
    """Of processes that torchrun started, one speaks."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK") == "0"


class PlainConsole(Console):
    """Prints text as it is: names in people's data hold brackets and colons, which rich would read
    as styles and emoji."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def on_broken_pipe(self) -> None:
        """Rich would end the process; the program decides the exit code itself."""
        raise BrokenPipeError


class Output:
    """Owns stdout while a command works.

    With as_json, file descriptor 1 leads to stderr until the result is written: no print of any
    library, in this process or a child, gets between the caller and the one JSON object.
    """

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._saved: int | None = None
        width = None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL
        self.console = PlainConsole(width=width)

    def __enter__(self) -> Self:
        if self._as_json:
            sys.stdout.flush()
            self._saved = os.dup(1)
            os.dup2(2, 1)
        return self

    def finish(self, result: dict[str, Any]) -> None:
        """Write the result, if it is to be written as JSON."""
        if self._saved is not None:
            self._restore()
            sys.stdout.write(json.dumps(result, ensure_ascii=False) + "\n")
            sys.stdout.flush()

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _restore(self) -> None:
        if self._saved is not None:
            sys.stdout.flush()
            os.dup2(self._saved, 1)
            os.close(self._saved)
            self._saved = None


def set_up_logging() -> None:
    """Log lines to stderr: coloured on a terminal, plain text otherwise."""
    handler: logging.Handler
    if sys.stderr.isatty():
        handler = RichHandler(console=Console(stderr=True), show_path=False, show_time=False)
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("paceline").setLevel(logging.INFO)


def quiet_libraries() -> None:
    """No bars of other libraries where no terminal is. They read the environment when loaded."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table whose first column is text and whose others are numbers, flush right."""
    made = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=box.SIMPLE_HEAD,
    )
    for i, column in enumerate(columns):
        made.add_column(column, justify="right" if i else "left", no_wrap=not i)
    for row in rows:
        made.add_row(*row)
    return made


def facts(title: str, pairs: Iterable[tuple[str, str]]) -> Table:
    """Name and value, line by line."""
    made = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None)
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in pairs:
        made.add_row(name, value)
    return made


def count(number: int | float | None) -> str:
    return "n/a" if number is None else f"{number:,.0f}"


def share(value: float | None) -> str:
    return "n/a" if value is None else f"{100 * value:.1f}%"


def counts(mapping: dict[str, int]) -> str:
    """{reason: n} in words."""
    return ", ".join(f"{name} {n:,}" for name, n in mapping.items()) or "none"


def sparkline(values: Sequence[float], width: int = _SPARKLINE_WIDTH) -> str:
    """Values as a line of blocks from lowest to highest, each the mean of its share of them."""
    width = min(width, len(values))
    borders = [i * len(values) // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(borders)]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((mean - low) * scale)] for mean in means)
