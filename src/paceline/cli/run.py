"""`paceline run`: prints the time of each stage, the acceptance lengths and where the page is."""

from typing import Any

from rich.console import Console

from paceline.cli import evaluate, extract
from paceline.cli.acceptance import show_acceptance
from paceline.cli.command import Command
from paceline.cli.output import table
from paceline.recipe import RunOptions


def show(result: dict[str, Any], console: Console) -> None:
    rows = [
        [name, "finished before" if stage["skipped"] else f"{stage['seconds']:,.1f} s"]
        for name, stage in result["stages"].items()
    ]
    console.print(table(f"Run {result['run_dir']}", ["stage", "time"], rows))
    show_acceptance(result["stages"]["evaluate"]["result"], console)
    console.print(f"page: {result['page']}", soft_wrap=True)


def problems(result: dict[str, Any]) -> list[str]:
    """What is less than full success in any stage."""
    return [
        problem
        for command in (extract.COMMAND, evaluate.COMMAND)
        for problem in command.problems(result["stages"][command.name]["result"])
    ]


COMMAND = Command("run", RunOptions, "paceline.run", show, problems)
