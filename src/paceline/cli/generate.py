"""`paceline generate`: prints how many answers the target wrote, and how they ended."""

from typing import Any

from rich.console import Console

from paceline.cli.command import Command
from paceline.cli.output import count, counts, facts
from paceline.recipe import GenerateOptions


def show(result: dict[str, Any], console: Console) -> None:
    pairs = [
        ("rows", f"{count(result['answered'])} answered of {count(result['rows'])}"),
        ("skipped rows", counts(result["skipped"])),
        ("answers", count(result["answers"])),
        ("answer tokens", count(result["response_tokens"])),
        ("ended by", counts(result["finish_reasons"])),
    ]
    if result.get("unanswered_turns"):  # folders of earlier versions do not say
        pairs.insert(3, ("turns not answered", count(result["unanswered_turns"])))
    console.print(facts("Answers by the target", pairs))


COMMAND = Command("generate", GenerateOptions, "paceline.prepare.generate", show)
