"""`paceline replay`: prints the loss of a step that stopped a training, sample by sample."""

from typing import Any

from rich.console import Console

from paceline.cli.command import Command
from paceline.cli.output import counts, facts, table
from paceline.recipe import ReplayOptions


def show(result: dict[str, Any], console: Console) -> None:
    recorded = result["recorded"]
    pairs = [
        ("optimiser step", str(result["step"])),
        ("loss", f"{_number(result['loss'])}, in training {recorded['loss']}"),
        ("gradient norm", f"{_number(result['grad_norm'])}, in training {recorded['grad_norm']}"),
        ("arithmetic", f"{result['dtype']} on {result['device']}"),
    ]
    console.print(facts("Replayed", pairs))
    # What is not finite comes first.
    ordered = sorted(result["samples"], key=lambda s: isinstance(s["loss"], float))
    rows = [
        [s["sample_id"], _number(s["loss"]), counts(s["not_finite"]), s["shard"]] for s in ordered
    ]
    columns = ["sample", "its share of the loss", "stored values not finite", "shard"]
    console.print(table("", columns, rows))


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


COMMAND = Command("replay", ReplayOptions, "paceline.train.replay", show)
