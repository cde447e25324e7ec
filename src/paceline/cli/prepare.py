"""`paceline prepare`: prints what the token data set holds."""

from typing import Any

from rich.console import Console

from paceline.cli.command import Command
from paceline.cli.output import count, counts, facts, table
from paceline.recipe import PrepareOptions


def show(result: dict[str, Any], console: Console) -> None:
    pairs = [
        ("rows", f"{count(result['rows_kept'])} kept of {count(result['rows'])}"),
        ("skipped rows", counts(result["skipped"])),
        ("conversations", count(result["conversations"])),
        ("longest sample", f"{count(result['longest_sample'])} tokens"),
        ("loss mask from", counts(result["mask_methods"])),
        ("cut to max_length", f"{count(result['cut'])} samples"),
    ]
    if result["notes"]:
        pairs.append(("notes", counts(result["notes"])))
    console.print(facts("Token data set", pairs))
    groups = {**result["splits"], **{f"source {k}": v for k, v in result["sources"].items()}}
    columns = ["", "samples", "tokens", "supervised"]
    rows = [[name, *(count(v[c]) for c in columns[1:])] for name, v in groups.items()]
    console.print(table("", columns, rows))


COMMAND = Command("prepare", PrepareOptions, "paceline.prepare", show)
