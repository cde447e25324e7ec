"""`paceline export`: prints the exported folders and the serving commands."""

from typing import Any

from rich.console import Console

from paceline.cli.command import Command
from paceline.recipe import ExportOptions


def show(result: dict[str, Any], console: Console) -> None:
    console.print(result)


COMMAND = Command("export", ExportOptions, "paceline.export", show)
