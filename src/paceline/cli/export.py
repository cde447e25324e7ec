"""`paceline export`: prints each exported form, how exactly it replays, and how to serve it."""

from typing import Any

from rich.console import Console

from paceline.cli.command import Command
from paceline.cli.output import table
from paceline.recipe import ExportOptions


def show(result: dict[str, Any], console: Console) -> None:
    rows = []
    for form, entry in result["forms"].items():
        replay = entry["replay"]
        seen = f"{replay['relative_error']:.1e} of {replay['bound']:.1e} allowed"
        rows.append([form, f"{entry['server']} >= {entry['lowest_version']}", entry["dtype"], seen])
    console.print(table("", ["form", "server", "dtype", "replay error"], rows))
    for form, entry in result["forms"].items():
        console.print(f"{form}: {entry['folder']}", style="bold", soft_wrap=True)
        console.print(entry["command"], soft_wrap=True)
    if kept := result["compact"]:
        text = f"compact: {kept['folder']}, {kept['bytes'] / 1e6:.2f} MB"
        console.print(text, style="bold", soft_wrap=True)


COMMAND = Command("export", ExportOptions, "paceline.export", show)
