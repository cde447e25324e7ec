"""`paceline train`: prints the draft's shape and its held-out figures per TTT step."""

from typing import Any

from rich.console import Console

from paceline.cli.command import Command
from paceline.cli.output import count, facts, share, table
from paceline.recipe import TrainOptions


def show(result: dict[str, Any], console: Console) -> None:
    draft = result["draft"]
    pairs = [
        ("optimiser steps", count(result["steps"])),
        ("samples", count(result["train_samples"])),
        ("arithmetic", f"{result['dtype']} on {result['device']}"),
        ("draft", f"{draft['num_layers']} layer(s), width {draft['hidden_size']}"),
        ("reads layers k", ", ".join(map(str, draft["aux_layers"]))),
    ]
    if best := result["best"]:
        length = f"{best['acceptance_length']:.2f} (K = {best['num_draft_tokens']})"
        pairs.append(("best held-out acceptance length", f"{length} after step {best['step']}"))
        pairs.append(("the draft is that after step", count(result["draft_step"])))
    console.print(facts("Draft", pairs))
    if heldout := result["heldout"]:
        show_heldout(heldout, console)


def show_heldout(heldout: dict[str, Any], console: Console) -> None:
    """Figures per TTT step on conversations that training never saw."""
    columns = ["held out, TTT step", "KL, nats", "top token equal", "sum of min(p, q)", "rows"]
    steps = zip(
        heldout["kl"],
        heldout["top1_agreement"],
        heldout["acceptance_rate"],
        heldout["rows"],
        strict=True,
    )
    rows = [
        [str(j), "n/a" if kl is None else f"{kl:.3f}", share(top), share(overlap), count(n)]
        for j, (kl, top, overlap, n) in enumerate(steps)
    ]
    console.print(table("", columns, rows))
    acceptance = heldout["acceptance"]
    if acceptance["acceptance_length"] is not None:
        about = f"{count(acceptance['conversations'])} held-out conversations"
        console.print(
            f"acceptance length {acceptance['acceptance_length']:.2f} at K = "
            f"{acceptance['num_draft_tokens']} on {about}"
        )


COMMAND = Command("train", TrainOptions, "paceline.train", show, on_ranks=True)
