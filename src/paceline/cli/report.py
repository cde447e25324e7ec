"""`paceline report`: prints where the page is."""

from typing import Any

from rich.console import Console

from paceline.cli.command import Command
from paceline.recipe import ReportOptions


def show(result: dict[str, Any], console: Console) -> None:
    console.print(f"page: {result['page']}", soft_wrap=True)


COMMAND = Command("report", ReportOptions, "paceline.report", show)
