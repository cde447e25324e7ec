"""Progress bars on long work: rich on a terminal, one log line a while otherwise.

All of it goes to stderr: stdout belongs to results.
"""

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

logger = logging.getLogger(__name__)

_LOG_INTERVAL_S = 30.0


class Bar:
    """Counts work done; `advance(n, note)` adds n units and shows the note beside the bar."""

    def __init__(self, description: str, total: int | None, unit: str) -> None:
        self.description = description
        self.total = total
        self.unit = unit
        self.done = 0
        self._started = self._logged = time.monotonic()

    def advance(self, count: int, note: str = "") -> None:
        self.done += count
        now = time.monotonic()
        if now - self._logged >= _LOG_INTERVAL_S:
            self._logged = now
            logger.info("%s", self.line(note))

    def line(self, note: str = "") -> str:
        elapsed = max(time.monotonic() - self._started, 1e-9)
        of_total = f"/{self.total:,}" if self.total else ""
        rate = self.done / elapsed
        text = f"{self.description}: {self.done:,}{of_total} {self.unit}, "
        text += f"{_rate_text(rate)} {self.unit}/s"
        if self.total and rate > 0:
            text += f", {max(self.total - self.done, 0) / rate:,.0f} s left"
        return f"{text} {note}".rstrip()


def _rate_text(rate: float) -> str:
    """Two digits at least: slow work does not go at 0 a second."""
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


class _RichBar(Bar):
    def __init__(self, description: str, total: int | None, unit: str, progress: Progress) -> None:
        super().__init__(description, total, unit)
        self._progress = progress
        self._task = progress.add_task(description, total=total, unit=unit, note="")

    def advance(self, count: int, note: str = "") -> None:
        self.done += count
        self._progress.update(self._task, advance=count, note=note)


class _RateColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        rate = _rate_text(task.speed) if task.speed else "-"
        return Text(f"{rate} {task.fields['unit']}/s", style="cyan")


@contextmanager
def progress_bar(
    description: str, total: int | None, unit: str, is_shown: bool = True
) -> Iterator[Bar]:
    """A bar for `total` units of work (None: unknown); plain log lines where no terminal is, and in
    threads beside the main one: a terminal shows one bar at a time. is_shown: False in processes
    whose work another one tells of."""
    is_main = threading.current_thread() is threading.main_thread()
    if not (is_shown and is_main and sys.stderr.isatty()):
        yield Bar(description, total, unit)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        _RateColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield _RichBar(description, total, unit, progress)
