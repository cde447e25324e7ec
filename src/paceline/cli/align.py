"""`paceline align`: prints how much of the supervised text the draft vocabulary can say."""

from typing import Any

from rich.console import Console

from paceline.cli.command import Command
from paceline.cli.output import count, facts, share, table
from paceline.recipe import AlignOptions


def show(result: dict[str, Any], console: Console) -> None:
    size = f"{count(result['draft_vocab_size'])} of {count(result['vocab_size'])} tokens"
    pairs = [
        ("size", size),
        ("covers", f"{share(result['coverage'])} of the supervised training tokens"),
        ("lost mass", share(result["lost_share"])),
        ("fillers, never seen", count(result["num_filler"])),
        ("ends a turn", ", ".join(map(str, result["end_of_turn_ids"]))),
    ]
    console.print(facts("Draft vocabulary", pairs))
    rows = [[count(p["draft_vocab_size"]), share(p["coverage"])] for p in result["curve"]]
    console.print(table("", ["of this size", "would cover"], rows))


COMMAND = Command("align", AlignOptions, "paceline.align", show)
